// Stores conversations, settings, the draft and the API key in the browser. Several tabs may write one conversation: a
// write is merged with the stored version.

import { merge, nameTurns } from "./merge.js";

const PREFIX = "weft:";
const CONVERSATION = `${PREFIX}conversation:`;

/** Storage until the page is closed, for browsers that block storage, always or in frames of other sites. */
class Memory {
  getItem(name) {
    return this[name] ?? null;
  }
  setItem(name, value) {
    this[name] = value;
  }
  removeItem(name) {
    delete this[name];
  }
}

/** The browser's storage of this name. Access to blocked storage may throw or return null. */
function open(name) {
  try {
    return window[name] ?? new Memory();
  } catch {
    return new Memory();
  }
}

const local = open("localStorage");
const session = open("sessionStorage");

/** Whether stored values outlive the page. */
export const isKept = !(local instanceof Memory);

function read(name, fallback) {
  try {
    return JSON.parse(local.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** @returns {boolean} false if there is no room */
function write(storage, name, value) {
  try {
    storage.setItem(name, value);
    return true;
  } catch {
    return false;
  }
}

/**
 * @typedef {object} Message
 * @property {"user"|"assistant"|"tool"} role
 * @property {string} content
 * @property {string} [reasoning]
 * @property {{id: string, name: string, arguments: string}[]} [calls]
 * @property {string} [call_id] of the call that a tool message answers
 * @property {[string, number, [string, number][], string][]} [tokens] name, log-probability, alternatives, shown text
 * @property {object} [stats] see `Answer`
 * @property {string} [finish] why the answer ended
 * @property {string} [error]
 * @property {boolean} [is_json] whether a schema was enforced
 * @property {string} [turn] name of the turn that a user's message begins
 * @property {number} [changed] when an answer was last stored, in milliseconds
 *
 * @typedef {{id: string, title: string, titled?: number, time: number, messages: Message[]}} Conversation
 * `titled` is when a user last renamed it.
 */

/** A unique name, across tabs too. */
export const newName = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);

/** @returns {Conversation} stored only once it has a message */
export function newConversation() {
  return { id: newName(), title: "", time: 0, messages: [] };
}

function readConversation(name) {
  const conversation = read(name, null);
  if (conversation) nameTurns(conversation.messages);
  return conversation;
}

/** @returns {Conversation[]} the latest first */
export function readConversations() {
  const names = Object.keys(local).filter((name) => name.startsWith(CONVERSATION));
  return names.map(readConversation).filter(Boolean).sort((a, b) => b.time - a.time);
}

/**
 * Store a conversation, and merge what other tabs have added into it. If the browser's storage is full, probabilities
 * are left out.
 * @param {Conversation} conversation
 * @returns {boolean} false if there is no room
 */
export function writeConversation(conversation) {
  const name = CONVERSATION + conversation.id;
  const { merged, isAhead } = merge(conversation, readConversation(name));
  Object.assign(conversation, merged);
  const lean = (key, value) => (key === "tokens" ? undefined : value);
  return !isAhead || [undefined, lean].some((replacer) => write(local, name, JSON.stringify(conversation, replacer)));
}

export const deleteConversation = (id) => local.removeItem(CONVERSATION + id);

/**
 * Call `onConversation` when another tab changes or deletes a conversation.
 * @param {(id: string, isDeleted: boolean) => void} onConversation
 */
export function watchOtherTabs(onConversation) {
  addEventListener("storage", ({ key: name, newValue }) => {
    if (name?.startsWith(CONVERSATION)) onConversation(name.slice(CONVERSATION.length), newValue === null);
  });
}

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

/** Settings are read once and written at every change. A sampling parameter is absent if the model's default holds. */
export const settings = { ...DEFAULTS, ...read(`${PREFIX}settings`, {}) };
export const writeSettings = () => write(local, `${PREFIX}settings`, JSON.stringify(settings));

/** A stored text; "" removes it. */
const text = (storage, name) => ({
  read: () => storage.getItem(PREFIX + name) ?? "",
  write: (value) => void (value ? write(storage, PREFIX + name, value) : storage.removeItem(PREFIX + name)),
});
export const draft = text(session, "draft");
export const current = text(session, "current");
export const theme = text(local, "theme");

const [kept, passing] = [text(local, "key"), text(session, "key")];

/** The API key, for this tab only or kept until it is removed. */
export const key = {
  read: () => passing.read() || kept.read(),
  isKept: () => Boolean(kept.read()),
  write(value, isKept) {
    kept.write(isKept ? value : "");
    passing.write(isKept ? "" : value);
  },
};
