// A conversation: a tree of messages, of which one path is shown. An edited message or another answer is an alternative
// beside the old one, with what follows each. Several tabs may change one conversation: `absorb` merges what they store.

const TITLE_LENGTH = 48;
export const ALIVE_MS = 10_000; // a growing answer is stored more often than this
const KEPT_MS = 60_000; // how long a deleted message can be brought back

/**
 * @typedef {object} Message
 * @property {string} id
 * @property {string} chat the conversation's id
 * @property {string|null} parent the message before it; null: none
 * @property {number} born in milliseconds, as all times
 * @property {number} changed when it was last changed, except for its place
 * @property {number} [moved] when it was given another parent
 * @property {number} [picked] when it was chosen among its alternatives
 * @property {boolean} [is_alternative] whether it was made to stand beside another one, not behind the last
 * @property {boolean} [is_deleted]
 * @property {{summary: string}} [cut] this message and those before it are not sent; the summary is, if there is one
 * @property {"user"|"assistant"|"tool"} role
 * @property {string} content
 * @property {({name: string, text: string}|import("./pictures.js").Picture)[]} [files] attached to a user's message
 * @property {string} [reasoning]
 * @property {{id: string, name: string, arguments: string}[]} [calls]
 * @property {{server: string, name: string, arguments: string, result: string}[]} [hosted] calls that the server made
 * @property {string} [call_id] of the call that a tool message answers
 * @property {[string, number, [string, number][], string][]} [tokens] name, log-probability, alternatives, shown text
 * @property {object} [stats] see `Answer`
 * @property {object} [asked] the parameters of the request
 * @property {string} [response_id] of an answer in the background that has not been read to its end
 * @property {number} [at] the number of its last event
 * @property {boolean} [is_left] its page was closed, so another one may read on
 * @property {string} [finish] why the answer ended; absent while it grows
 * @property {string} [error]
 * @property {string} [error_code]
 * @property {boolean} [is_json] whether a schema was enforced
 */

/** A unique name, across tabs too. */
export const newName = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);

export class Conversation {
  /** @param {{id: string, title: string, titled?: number, time: number, settings: object, settled?: number}} meta */
  constructor(meta) {
    Object.assign(this, { id: newName(), title: "", titled: 0, time: 0, settings: {}, settled: 0 }, meta);
    /** @type {Map<string, Message>} */
    this.nodes = new Map();
    this.dirty = new Set(); // ids of messages that are not stored yet
    /** @type {Set<string[]>} */
    this.writing = new Set(); // ids that are on their way to the database
    this.added = new Set(); // ids of messages that are not stored yet, since `add`
    this.isStored = false; // it was, so if it is stored no more, another tab has deleted it
    this.isDeleted = false;
  }

  /** What is stored beside the messages. `titled` is when a user last renamed it, `settled` when its settings changed. */
  get meta() {
    const { id, title, titled, time, settings, settled } = this;
    return { id, title, titled, time, settings: { ...settings }, settled };
  }

  /** @returns {Map<string|null, Message[]>} what follows each message, the oldest first */
  following() {
    const following = new Map();
    for (const node of this.nodes.values()) {
      if (!following.has(node.parent)) following.set(node.parent, []);
      following.get(node.parent).push(node);
    }
    for (const nodes of following.values()) nodes.sort((a, b) => a.born - b.born || (a.id < b.id ? -1 : 1));
    return following;
  }

  /** @returns {Message[]} the path that is chosen, with deleted messages that others follow */
  fullPath(from = null) {
    const following = this.following();
    const path = [];
    for (let at = from; ; at = path.at(-1).id) {
      const options = options_(following, at);
      if (!options.length) return path;
      path.push(chosen(options));
    }
  }

  /** @returns {Message[]} the messages that are shown and may be sent */
  path() {
    return this.fullPath().filter((node) => !node.is_deleted);
  }

  /** @returns {Message[]} a message and its alternatives, the oldest first; tool results have none */
  alternatives(node) {
    return node.role === "tool" ? [node] : options_(this.following(), node.parent).filter((other) => other.role === node.role);
  }

  // --- changes -----------------------------------------------------------------------------------------------------

  /** Note a change, so that the next write stores it, later than what any tab has stored of this message. */
  touch(node, what = "changed") {
    this.time = Math.max(Date.now(), this.time + 1); // even if the clock goes back
    node[what] = this.time;
    this.dirty.add(node.id);
  }

  /** Add a message behind `parent`. */
  add(parent, values) {
    const node = { id: newName(), chat: this.id, parent: parent?.id ?? null, ...values };
    this.nodes.set(node.id, node);
    this.added.add(node.id);
    this.touch(node);
    node.born = node.changed;
    this.adopt(node);
    this.pick(node);
    if (!this.titled) this.title = titleOf(this.path());
    return node;
  }

  /** Make the path lead over a message. */
  pick(node) {
    const following = this.following();
    for (let at = node; at; at = this.nodes.get(at.parent)) {
      const options = options_(following, at.parent);
      if (!options.includes(at) || chosen(options) !== at) this.touch(at, "picked");
    }
  }

  /** Mark a message and what follows it up to the next user's message as deleted, or bring it back. */
  remove(node, isDeleted = true) {
    const following = this.following();
    const marked = [];
    const mark = (each) => {
      marked.push(each);
      each.is_deleted = isDeleted;
      this.touch(each);
      for (const next of following.get(each.id) ?? []) if (next.role !== "user") mark(next);
    };
    mark(node);
    if (!this.titled) this.title = titleOf(this.path());
    return marked;
  }

  /** Forget the words of messages that were deleted a while ago. */
  forget() {
    for (const node of this.nodes.values()) {
      if (!node.is_deleted || node.content === "" || Date.now() - node.changed < KEPT_MS) continue;
      const { id, chat, parent, born, changed, moved, picked, role, is_alternative } = node;
      const husk = { id, chat, parent, born, changed, moved, picked, role, is_alternative, is_deleted: true, content: "" };
      this.nodes.set(id, husk);
      this.dirty.add(id);
    }
  }

  // --- other tabs --------------------------------------------------------------------------------------------------

  /**
   * Merge what is stored. Of a message, the later version counts. What this tab adds at a place where another has added
   * something goes behind that; only what was made as an alternative stays beside it.
   * @param {object|undefined} meta
   * @param {Message[]} stored
   */
  absorb(meta, stored) {
    if (meta) {
      if ((meta.titled ?? 0) > this.titled) Object.assign(this, { title: meta.title, titled: meta.titled });
      if ((meta.settled ?? 0) > this.settled) Object.assign(this, { settings: meta.settings, settled: meta.settled });
      this.time = Math.max(this.time, meta.time);
    }
    const known = new Set(stored.map((node) => node.id));
    const added = [...this.nodes.values()].filter((node) => this.added.has(node.id) && !known.has(node.id));
    const unknown = stored.filter((node) => !this.nodes.has(node.id));
    for (const node of added) this.nodes.delete(node.id);
    for (const node of stored) this.update(node);
    for (const node of added) this.place(node, unknown);
    if (!this.titled) this.title = titleOf(this.path()) || this.title;
  }

  update(stored) {
    const mine = this.nodes.get(stored.id);
    if (!mine) return void this.nodes.set(stored.id, stored);
    const { parent, moved } = (stored.moved ?? 0) > (mine.moved ?? 0) ? stored : mine;
    const picked = Math.max(stored.picked ?? 0, mine.picked ?? 0);
    if (stored.changed > mine.changed) { // in place: a view or an answer may hold it
      for (const name of Object.keys(mine)) if (!(name in stored)) delete mine[name];
      Object.assign(mine, stored);
    }
    Object.assign(mine, { parent, moved, picked });
  }

  place(node, unknown) {
    if (!node.is_alternative && node.role === "user") node.parent = this.fullPath(node.parent).at(-1)?.id ?? node.parent;
    this.nodes.set(node.id, node);
    this.adopt(node);
    this.pick(node);
    if (!node.is_alternative) return;
    const names = new Set(unknown.map(({ id }) => id));
    for (const other of unknown) if (!names.has(other.parent) && this.isOfTurn(other.parent, node)) this.moveBehind(node, other);
  }

  /** A turn that another tab has begun while this one was still going on comes behind it. */
  adopt(node) {
    if (node.role === "user") return;
    for (const other of [...this.nodes.values()]) if (other.parent === node.parent) this.moveBehind(node, other);
  }

  moveBehind(node, other) {
    if (other.role !== "user" || other.is_alternative) return;
    other.parent = this.fullPath(node.id).at(-1)?.id ?? node.id;
    this.touch(other, "moved");
  }

  /** Whether a message is an alternative of `node`, or belongs to the turn of one. */
  isOfTurn(id, node) {
    for (let at = this.nodes.get(id); at; at = this.nodes.get(at.parent)) {
      if (at.parent === node.parent) return at !== node;
      if (at.role === "user") return false;
    }
    return false;
  }
}

const chosen = (options) => options.reduce((best, node) => ((node.picked ?? 0) >= (best.picked ?? 0) ? node : best));

/** What can be chosen: a deleted message only if others follow it. */
function options_(following, parent) {
  return (following.get(parent) ?? []).filter((node) => !node.is_deleted || following.has(node.id));
}

function titleOf(path) {
  const first = path.find((node) => node.role === "user");
  const text = (first?.content.trim() || first?.files?.[0].name || "").split("\n")[0];
  return text.length > TITLE_LENGTH ? `${text.slice(0, TITLE_LENGTH)}…` : text || "Chat";
}
