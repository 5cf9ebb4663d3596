// Stores conversations. Several tabs may write one: a write is merged with what is stored. A conversation that cannot be
// stored stays in memory, and is listed, until it can.

import { Conversation, newName } from "./conversation.js";
import { isKept, transact } from "./db.js";
import { defaults, fresh, legacy, rescue } from "./local.js";
import { isPicture, isPictureUrl } from "./pictures.js";

export { isKept };

/** Conversations that are shown, answered or not stored, by id: there is one object for each. */
const held = new Map();
/** Ids of conversations of which something is not stored, since there is no room. */
export const unsaved = new Set();

const channel = (() => {
  try {
    return new BroadcastChannel("weft");
  } catch {
    return null;
  }
})();

const hold = (conversation) => held.set(conversation.id, conversation).get(conversation.id);

/** Let go of conversations that are neither kept in use nor unsaved. */
export function release(isUsed) {
  for (const [id, conversation] of held) if (!isUsed(conversation) && !unsaved.has(id)) held.delete(id);
}

/** @returns {Conversation} with the default settings; stored only once it has a message */
export function newConversation(settings = defaults.read()) {
  fresh.write(settings);
  return new Conversation({ settings });
}

/** The conversation without a message as a reload left it. */
export const freshConversation = () => newConversation({ ...defaults.read(), ...fresh.read() });

/** @returns {Promise<object[]>} what is stored beside the messages of each, the latest first */
export async function listConversations() {
  const stored = await transact("readonly", (handle) => handle.allChats());
  const metas = new Map(stored.map((meta) => [meta.id, meta]));
  for (const id of unsaved) metas.set(id, held.get(id).meta);
  return [...metas.values()].sort((a, b) => b.time - a.time);
}

/** @returns {Promise<Conversation|null>} null if there is none of this id */
export async function readConversation(id) {
  const [meta, messages] = await transact("readonly", async (handle) => [await handle.chat(id), await handle.messagesOf(id)]);
  const known = held.get(id);
  if (!meta) return known ?? null;
  const conversation = hold(known ?? new Conversation(meta));
  conversation.absorb(meta, messages);
  conversation.isStored = true;
  conversation.forget();
  return conversation;
}

/**
 * Store what has changed, and take over what other tabs have changed.
 * @param {Conversation} conversation
 * @returns {Promise<boolean>} false if there is no room
 */
export async function writeConversation(conversation) {
  if (!held.has(conversation.id)) hold(conversation);
  for (const leaner of [(message) => message, ({ tokens, ...message }) => message]) {
    if (conversation.isDeleted) return true;
    const written = [];
    conversation.writing.add(written);
    try {
      await transact("readwrite", (handle) => write(handle, conversation, leaner, written));
      unsaved.delete(conversation.id);
      if (!conversation.isDeleted) conversation.isStored = true;
      conversation.added.clear();
      channel?.postMessage({ id: conversation.id });
      return true;
    } catch {
      for (const id of written) conversation.dirty.add(id);
    } finally {
      conversation.writing.delete(written);
    }
  }
  unsaved.add(conversation.id);
  return false;
}

async function write(handle, conversation, leaner, written) {
  const { id, dirty } = conversation;
  const meta = await handle.chat(id);
  if (!meta && conversation.isStored) return void (conversation.isDeleted = true);
  if (meta) conversation.absorb(meta, await handle.messagesOf(id));
  written.push(...dirty);
  dirty.clear();
  for (const name of written) handle.putMessage(leaner(conversation.nodes.get(name))).catch(() => {});
  await handle.putChat(conversation.meta);
}

/** A message as it is kept where there is no room for its pictures. */
const withoutPictures = ({ files, ...message }) =>
  files ? { ...message, files: files.map((file) => (isPicture(file) ? { name: file.name, text: "(This picture was not kept.)" } : file)) } : message;

/**
 * Keep what is not in the database yet, as the page is closed; the next page takes it over.
 * @param {(message: object) => object} ended gives a message as it is kept
 */
export function rescueAll(ended) {
  for (const { id, meta, nodes, dirty, writing, isStored, isDeleted } of held.values()) {
    const ids = new Set([...dirty, ...[...writing].flat()]);
    if (!ids.size || isDeleted) continue;
    const rescued = { id: `${id}.${newName()}`, meta, isStored, nodes: [...ids].map((name) => ended(nodes.get(name))) };
    if (!rescue.write(rescued)) rescue.write({ ...rescued, nodes: rescued.nodes.map(withoutPictures) });
  }
}

/** Store the settings of a conversation, without reading its messages. */
export async function writeSettings(conversation) {
  const { id, settings, settled, isStored } = conversation;
  if (!isStored) return void fresh.write(settings);
  try {
    await transact("readwrite", async (handle) => {
      const meta = await handle.chat(id);
      if (meta) await handle.putChat({ ...meta, settings: { ...settings }, settled });
    });
    channel?.postMessage({ id });
  } catch {
    unsaved.add(id);
  }
}

/** Store one message that grows, without reading the others. */
export async function writeGrowing(conversation, message) {
  conversation.touch(message);
  try {
    await transact("readwrite", async (handle) => {
      if (await handle.chat(conversation.id)) await handle.putMessage(message);
    });
    channel?.postMessage({ id: conversation.id });
  } catch { /* its end is told of */ }
}

export async function deleteConversation(id) {
  const conversation = held.get(id);
  if (conversation) conversation.isDeleted = true;
  held.delete(id);
  unsaved.delete(id);
  await transact("readwrite", (handle) => handle.remove(id));
  channel?.postMessage({ id, isDeleted: true });
}

/**
 * Call `onConversation` when another tab changes or deletes a conversation.
 * @param {(id: string, isDeleted: boolean) => void} onConversation
 */
export function watchOtherTabs(onConversation) {
  channel?.addEventListener("message", ({ data: { id, isDeleted } }) => {
    if (isDeleted && held.has(id)) held.get(id).isDeleted = true;
    if (isDeleted) held.delete(id);
    onConversation(id, Boolean(isDeleted));
  });
}

/**
 * Find conversations that hold every word of a text, in their title or in one message.
 * @returns {Promise<Map<string, string>>} the place in each, by id; "" where it is the title
 */
export async function searchConversations(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const holds = (content) => words.every((word) => content.toLowerCase().includes(word));
  const found = new Map();
  for (const { id, title } of await listConversations()) if (holds(title)) found.set(id, "");
  await transact("readonly", (handle) =>
    handle.scan(({ chat, content, is_deleted: isDeleted }) => {
      if (isDeleted || found.has(chat) || !holds(content)) return;
      const at = Math.max(0, content.toLowerCase().indexOf(words[0]) - 20);
      found.set(chat, `${at ? "…" : ""}${content.slice(at, at + 80).replace(/\s+/g, " ")}`);
    }));
  return found;
}

// --- taking over ---------------------------------------------------------------------------------------------------

const isText = (value) => typeof value === "string";
const listOf = (names) => (value) => Array.isArray(value) && value.every((each) => names.every((name) => isText(each?.[name])));
const FIELDS = {
  ...Object.fromEntries(["id", "content", "reasoning", "call_id", "finish", "error", "error_code", "turn"].map((name) => [name, isText])),
  ...Object.fromEntries(["born", "changed", "moved", "picked"].map((name) => [name, Number.isFinite])),
  ...Object.fromEntries(["is_alternative", "is_deleted", "is_json", "is_edited"].map((name) => [name, (value) => typeof value === "boolean"])),
  role: (value) => ["user", "assistant", "tool"].includes(value),
  parent: (value) => value === null || isText(value),
  cut: (value) => isText(value?.summary),
  calls: listOf(["id", "name", "arguments"]),
  files: (value) => Array.isArray(value) && value.every((file) => isText(file?.name) && (isPicture(file) ? isPictureUrl(file.url) : isText(file.text))),
  hosted: listOf(["server", "name", "arguments", "result"]),
  stats: (value) => Object.values(value ?? 0).every(Number.isFinite),
  asked: (value) => typeof value === "object" && value !== null,
  tokens: (value) => Array.isArray(value) && value.every((token) => token?.length === 4 && Array.isArray(token[2])),
};

/** A message of a file, without what is none of its fields. */
function readMessage(given) {
  const message = {};
  for (const [name, fits] of Object.entries(FIELDS)) if (given?.[name] !== undefined && fits(given[name])) message[name] = given[name];
  return message.role && isText(message.content) ? { ...(message.role === "assistant" && { stats: {}, calls: [], reasoning: "" }), ...message } : null;
}

/**
 * A conversation from a file or an older page, in which messages were a list.
 * @returns {Conversation|null} null if it is none
 */
export function fromPlain(plain) {
  const { nodes, messages, title, titled = 0, time, settled = 0, settings } = plain ?? {};
  const given = nodes ?? messages;
  if (!Array.isArray(given) || !isText(title)) return null;
  const id = isText(plain.id) ? plain.id : newName();
  const meta = { id, title, titled, settled, time: Number(time) || 0, settings: { ...defaults.read(), ...settings } };
  const conversation = new Conversation(meta);
  let parent = null;
  for (const [index, message] of given.map(readMessage).entries()) {
    if (!message) continue;
    const { turn = "", ...rest } = message;
    const name = message.id ?? (message.role === "user" && turn.length > 8 ? turn : `${id}.${index}`);
    const ended = message.role === "assistant" && { finish: message.finish ?? "stop" };
    conversation.nodes.set(name, { parent, born: index, changed: meta.time, ...rest, ...(!nodes && ended), id: name, chat: id });
    conversation.dirty.add(name);
    parent = name;
  }
  return conversation.nodes.size ? conversation : null;
}

/** Move what older pages, and answers that grew when a page was closed, have left in the other storage. */
export async function takeOver() {
  if (!(await isKept())) return;
  for (const name of legacy.names()) {
    const conversation = fromPlain(legacy.read(name));
    if (!conversation || (await writeConversation(conversation))) legacy.remove(name);
  }
  release(() => false);
  for (const rescued of rescue.list()) {
    const { meta, nodes, isStored } = rescued;
    const conversation = (await readConversation(meta.id)) ?? (isStored ? null : new Conversation(meta)); // null: it was deleted
    for (const node of conversation ? nodes : []) {
      if (!conversation.nodes.has(node.id)) conversation.added.add(node.id);
      conversation.update(node);
      conversation.dirty.add(node.id);
    }
    if (!conversation || (await writeConversation(conversation))) rescue.remove(rescued);
  }
}
