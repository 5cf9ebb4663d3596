// The browser's database of conversations, their messages, and files that are not sent yet. Where it is blocked, both are kept until the page is
// closed. A transaction sees nothing of others that run at the same time, in other tabs either.

const NAME = "weft";
const STORES = ["chats", "messages", "drafts"];

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** What a transaction can do; it may await nothing else. */
class Handle {
  constructor(transaction) {
    this.chats = transaction.objectStore("chats");
    this.messages = transaction.objectStore("messages");
    this.drafts = transaction.objectStore("drafts");
  }
  chat = (id) => settled(this.chats.get(id));
  allChats = () => settled(this.chats.getAll());
  messagesOf = (chat) => settled(this.messages.index("chat").getAll(chat));
  putChat = (chat) => settled(this.chats.put(chat));
  putMessage = (message) => settled(this.messages.put(message));
  async remove(chat) {
    await settled(this.chats.delete(chat));
    for (const id of await settled(this.messages.index("chat").getAllKeys(chat))) this.messages.delete(id);
  }
  allDrafts = () => settled(this.drafts.getAll());
  putDraft = (draft) => settled(this.drafts.put(draft));
  removeDraft = (id) => settled(this.drafts.delete(id));
  /** Call `visit` with every message. */
  scan(visit) {
    return new Promise((resolve, reject) => {
      const request = this.messages.openCursor();
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor) return void resolve();
        visit(cursor.value);
        cursor.continue();
      };
    });
  }
}

/** The same until the page is closed. */
class MemoryHandle {
  [STORES[0]] = new Map();
  [STORES[1]] = new Map();
  [STORES[2]] = new Map();
  chat = async (id) => this.chats.get(id);
  allChats = async () => [...this.chats.values()];
  messagesOf = async (chat) => [...this.messages.values()].filter((message) => message.chat === chat);
  putChat = async (chat) => void this.chats.set(chat.id, chat);
  putMessage = async (message) => void this.messages.set(message.id, structuredClone(message));
  async remove(chat) {
    this.chats.delete(chat);
    for (const [id, message] of this.messages) if (message.chat === chat) this.messages.delete(id);
  }
  allDrafts = async () => [...this.drafts.values()];
  putDraft = async (draft) => void this.drafts.set(draft.id, draft);
  removeDraft = async (id) => void this.drafts.delete(id);
  scan = async (visit) => this.messages.forEach(visit);
}

function connect() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 2);
    request.onupgradeneeded = () => {
      const lacking = STORES.filter((store) => !request.result.objectStoreNames.contains(store));
      for (const store of lacking) request.result.createObjectStore(store, { keyPath: "id" });
      if (lacking.includes("messages")) request.transaction.objectStore("messages").createIndex("chat", "chat");
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

const memory = new MemoryHandle();
let database = null; // a promise; of null if the browser keeps nothing

function opened() {
  database ??= (async () => {
    try {
      const connection = await connect();
      connection.onversionchange = () => connection.close();
      connection.onclose = () => (database = null);
      return connection;
    } catch {
      return null;
    }
  })();
  return database;
}

/** Whether stored conversations outlive the page. */
export const isKept = async () => (await opened()) !== null;

/**
 * Run one transaction.
 * @param {"readonly"|"readwrite"} mode
 * @param {(handle: Handle) => Promise<any>} work
 * @returns {Promise<any>} what `work` returns, once it is stored
 * @throws {DOMException} and nothing is changed: there is no room
 */
export async function transact(mode, work) {
  const connection = await opened();
  if (!connection) return work(memory);
  const transaction = connection.transaction(STORES, mode);
  const ended = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error ?? new DOMException("The transaction was aborted.", "AbortError"));
  });
  ended.catch(() => {}); // `work` may fail first
  try {
    const result = await work(new Handle(transaction));
    await ended;
    return result;
  } catch (error) {
    try {
      transaction.abort();
    } catch { /* it has ended */ }
    throw error;
  }
}
