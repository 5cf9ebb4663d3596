// What is kept in the browser: conversations, settings, the draft and the API key. Nothing here leaves it.

const PREFIX = "weft:";
const CONVERSATION = `${PREFIX}conversation:`;

function read(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

/**
 * @typedef {object} Message
 * @property {"user"|"assistant"|"tool"} role
 * @property {string} content
 * @property {string} [reasoning]
 * @property {{id: string, name: string, arguments: string}[]} [calls]
 * @property {string} [call_id] of the call that a tool message answers
 * @property {[string, number, [string, number][]][]} [tokens] text, log-probability, alternatives
 * @property {object} [stats] see `Answer`
 * @property {string} [finish] why it ended
 * @property {string} [error]
 * @property {boolean} [is_json] held to a schema
 *
 * @typedef {{id: string, title: string, time: number, messages: Message[]}} Conversation
 */

/** @returns {Conversation} not stored before it has a message */
export function newConversation() {
  return { id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), title: "", time: 0, messages: [] };
}

/** @returns {Conversation[]} the latest first */
export function readConversations() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(CONVERSATION));
  return names.map((name) => read(name, null)).filter(Boolean).sort((a, b) => b.time - a.time);
}

/**
 * Store a conversation. When the browser's room is used up, probabilities go first.
 * @returns {boolean} false if there is no room
 */
export function writeConversation(conversation) {
  const lean = (name, value) => (name === "tokens" ? undefined : value);
  for (const replacer of [undefined, lean]) {
    try {
      localStorage.setItem(CONVERSATION + conversation.id, JSON.stringify(conversation, replacer));
      return true;
    } catch { /* full: the next round takes less */ }
  }
  return false;
}

export const deleteConversation = (id) => localStorage.removeItem(CONVERSATION + id);

const DEFAULTS = {
  system: "",
  stop: "",
  tools_on: false,
  tools: "",
  tool_choice: "auto",
  schema_on: false,
  schema: "",
  thinking: false,
  probabilities: false,
};

/** Settings are read once and written with every change; sampling is absent where the model's default holds. */
export const settings = { ...DEFAULTS, ...read(`${PREFIX}settings`, {}) };
export const writeSettings = () => localStorage.setItem(`${PREFIX}settings`, JSON.stringify(settings));

/** A short text under a name; "" removes it. */
const text = (storage, name) => ({
  read: () => storage.getItem(PREFIX + name) ?? "",
  write: (value) => (value ? storage.setItem(PREFIX + name, value) : storage.removeItem(PREFIX + name)),
});
export const draft = text(sessionStorage, "draft");
export const current = text(sessionStorage, "current");
export const theme = text(localStorage, "theme");

const [kept, passing] = [text(localStorage, "key"), text(sessionStorage, "key")];

/** The API key: for this tab, or kept until it is removed. */
export const key = {
  read: () => passing.read() || kept.read(),
  isKept: () => Boolean(kept.read()),
  write(value, isKept) {
    kept.write(isKept ? value : "");
    passing.write(isKept ? "" : value);
  },
};
