// What the browser keeps of the page itself: drafts, the API key, the theme, defaults and presets. Conversations are in
// `store.js`. Where storage is blocked, everything is kept until the page is closed.

const PREFIX = "weft:";

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

const DEFAULTS = {
  model: "",
  system: "",
  stop: "",
  tools_on: false,
  tools: "",
  tool_choice: "auto",
  mcp_servers: [],
  schema_on: false,
  schema: "",
  thinking: false,
  background: false,
  probabilities: false,
};

/** Settings of a new conversation. A sampling parameter is absent if the model's default holds. */
export const defaults = {
  /** Settings of an older page held for every conversation; modes that were left on there do not begin new ones. */
  read: () => ({ ...DEFAULTS, ...read(`${PREFIX}settings`, {}), tools_on: false, schema_on: false, ...read(`${PREFIX}defaults`, {}) }),
  write: (settings) => write(local, `${PREFIX}defaults`, JSON.stringify(settings)),
  forget: () => [`${PREFIX}settings`, `${PREFIX}defaults`].forEach((name) => local.removeItem(name)),
};

/** Named system prompts: a list of `{name, text}`. */
export const presets = {
  read: () => read(`${PREFIX}presets`, []),
  write: (list) => write(local, `${PREFIX}presets`, JSON.stringify(list)),
};

/** Settings of a conversation that has no message yet, so that a reload keeps them. */
export const fresh = {
  read: () => JSON.parse(session.getItem(`${PREFIX}fresh`) ?? "null"),
  write: (settings) => write(session, `${PREFIX}fresh`, JSON.stringify(settings)),
};

/** A stored text; "" removes it. */
const text = (storage, name) => ({
  read: () => storage.getItem(PREFIX + name) ?? "",
  write: (value) => void (value ? write(storage, PREFIX + name, value) : storage.removeItem(PREFIX + name)),
});
export const draft = text(session, "draft");
export const current = text(session, "current");
export const tab = text(session, "tab");
export const theme = text(local, "theme");
export const folded = text(local, "folded");

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

const CONVERSATION = `${PREFIX}conversation:`;
const RESCUED = `${PREFIX}rescued:`;

/** Conversations that an older page kept here; its tabs may still write one. */
export const legacy = {
  names: () => Object.keys(local).filter((name) => name.startsWith(CONVERSATION)),
  read: (name) => read(name, null),
  remove: (name) => local.removeItem(name),
};

/** What was not stored yet when a page was closed: only this storage is written before the page is gone. */
export const rescue = {
  write: (rescued) => write(local, RESCUED + rescued.id, JSON.stringify(rescued)),
  list: () => Object.keys(local).filter((name) => name.startsWith(RESCUED)).map((name) => read(name, null)).filter(Boolean),
  remove: ({ id }) => local.removeItem(RESCUED + id),
};
