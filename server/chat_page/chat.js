// The open conversation: what can be done with it, and its messages on the page.

import { newAnswer } from "./answer.js";
import { Conversation } from "./conversation.js";
import { byId, el } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { current } from "./local.js";
import { AnswerView, UserView } from "./message_view.js";
import { Fault, buildBody, resultsOf, sentPath } from "./request.js";
import { Runs } from "./runs.js";
import { askForKey, showSection } from "./settings_view.js";
import { readConversation, release, writeConversation } from "./store.js";

const NEAR_END = 48;
const PAUSE = 4; // between two redraws, in multiples of the duration of the last one

export class Chat {
  /**
   * @param {object} hooks
   * @param {() => void} hooks.onChange after a change that the list of conversations or the composer shows
   * @param {() => void} hooks.onOpen
   * @param {(message: object) => void} hooks.onEdit
   * @param {(example: object) => void} hooks.onExample
   * @param {(text: string, undo: () => void) => void} hooks.onUndoable
   */
  constructor(hooks) {
    Object.assign(this, { hooks, conversation: new Conversation({}), known: new Map(), sticks: true, due: 0, views: new Map(), cuts: new WeakMap() });
    /** Ids of conversations with an answer that nobody has seen. */
    this.unseen = new Set();
    this.runs = new Runs((run) => this.draw(run.message), (run, error) => this.finish(run, error));
    this.log = byId("log");
    this.log.addEventListener("scroll", () => {
      this.sticks = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END;
      byId("to-end").hidden = this.sticks;
      byId("alternatives").hidden = true;
    });
    byId("to-end").addEventListener("click", () => this.scrollToEnd());
  }

  /** What the model of this conversation can do; null if that is not known yet. */
  get model() {
    return this.known.get(this.conversation.settings.model ?? "") ?? null;
  }

  get isRunning() {
    return this.runs.of(this.conversation).length > 0;
  }

  open(conversation) {
    this.conversation = conversation;
    this.unseen.delete(conversation.id);
    release((other) => other === conversation || this.runs.of(other).length);
    current.write(conversation.id);
    this.views.clear();
    this.hooks.onOpen();
    this.show();
    this.scrollToEnd();
  }

  // --- asking ------------------------------------------------------------------------------------------------------

  /**
   * Send a message behind the last one, or in the place of one, which stays as an alternative.
   * @param {{content: string, files?: object[]}} values
   * @param {import("./conversation.js").Message|null} edited
   * @throws {Fault} before anything is sent or changed
   */
  ask(values, edited = null) {
    const { conversation } = this;
    const parent = edited ? conversation.nodes.get(edited.parent) : conversation.fullPath().at(-1);
    this.check([...this.pathTo(parent), { role: "user", ...values }]);
    const user = conversation.add(parent, { role: "user", ...values, ...(edited && { is_alternative: true }) });
    this.answer(user);
  }

  /** Request another answer beside this one. */
  retry(message) {
    if (this.isRunning) return;
    this.attempt(() => {
      const parent = this.conversation.nodes.get(message.parent);
      this.check(this.pathTo(parent));
      this.answer(parent, true);
    });
  }

  answerCalls(message, results) {
    const tools = message.calls.map((call) => ({ role: "tool", call_id: call.id, content: results.get(call.id) }));
    this.attempt(() => {
      this.check([...this.pathTo(message), ...tools]);
      this.views.delete(message.id); // what is typed there is sent
      this.answer(tools.reduce((parent, values) => this.conversation.add(parent, values), message));
    });
  }

  /** The messages from the first to this one. */
  pathTo(message) {
    const path = [];
    for (let at = message; at; at = this.conversation.nodes.get(at.parent)) if (!at.is_deleted) path.unshift(at);
    return path;
  }

  check = (path) => buildBody(path, this.conversation.settings, this.model);

  answer(parent, isAlternative = false) {
    const { conversation } = this;
    const { settings } = conversation;
    const body = this.check(this.pathTo(parent));
    const { messages, stream, stream_options: options, tools, ...asked } = body;
    const message = conversation.add(parent, { ...newAnswer(), is_json: settings.schema_on, is_alternative: isAlternative, asked });
    this.runs.start(conversation, message, body);
    this.save();
    this.show();
    this.scrollToEnd();
  }

  async finish({ conversation, message }, error) {
    const isShown = conversation === this.conversation;
    conversation.touch(message);
    if (!isShown) this.unseen.add(conversation.id);
    if (isShown) this.show();
    if (isShown) announce(message);
    await this.save(conversation);
    if (error?.status !== 401 || !(await askForKey(error.message)) || conversation !== this.conversation) return;
    if (conversation.path().at(-1) === message) this.retry(message);
  }

  stop() {
    this.runs.stop(this.conversation);
  }

  // --- changing ----------------------------------------------------------------------------------------------------

  /** Put an answer with other words beside this one. */
  rewrite(message, content) {
    const { id, chat, born, changed, picked, moved, tokens, error, error_code: code, parent, ...rest } = message;
    const values = { ...rest, content, finish: "stop", is_alternative: true, is_edited: true };
    this.conversation.add(this.conversation.nodes.get(parent), values);
    this.change();
  }

  remove(message) {
    const { conversation } = this;
    for (const { message: running, abort } of this.runs.of(conversation)) if (this.pathTo(running).includes(message)) abort.abort();
    const removed = conversation.remove(message);
    this.change();
    const what = message.role === "user" ? "The message and its answer are deleted." : "The answer is deleted.";
    this.hooks.onUndoable(what, () => {
      for (const node of removed) {
        node.is_deleted = false;
        conversation.touch(node);
      }
      this.change(conversation);
    });
  }

  pick(message) {
    this.conversation.pick(message);
    this.change();
  }

  change(conversation = this.conversation) {
    this.save(conversation);
    if (conversation === this.conversation) this.show();
  }

  /** Run an action; if a field of the panel is invalid, go to that field. Returns whether the action succeeded. */
  attempt(action) {
    try {
      action();
      return true;
    } catch (error) {
      if (!(error instanceof Fault)) throw error;
      byId("announcer").textContent = error.message;
      showSection(error.section);
      return false;
    }
  }

  async save(conversation = this.conversation) {
    await writeConversation(conversation);
    if (conversation === this.conversation) this.show(); // with what other tabs have added
    else this.hooks.onChange();
  }

  /** Show what another tab has saved. */
  async sync() {
    const { conversation } = this;
    if (!conversation.isStored || !(await readConversation(conversation.id))) return;
    if (conversation === this.conversation) this.show();
  }

  // --- showing -----------------------------------------------------------------------------------------------------

  /** Show all messages. Those that look the same keep their nodes, and so what is typed there. */
  show() {
    const path = this.conversation.path();
    const sent = new Set(sentPath(path));
    const state = { path, sent, last: path.at(-1), isRunning: this.isRunning };
    const shown = path.flatMap((message) => [
      ...(message.role === "tool" ? [] : [this.view(message, state).element]),
      ...(message.cut ? [this.cutView(message)] : []),
    ]);
    for (const id of this.views.keys()) if (!path.some((message) => message.id === id)) this.views.delete(id);
    arrange(byId("messages"), shown.length ? shown : [this.welcome()]);
    byId("title").textContent = path.length || this.conversation.titled ? this.conversation.title : "New chat";
    if (this.sticks) this.scrollToEnd();
    this.hooks.onChange();
  }

  /** The view of a message; a new one if it looks different than it did. */
  view(message, { path, sent, last, isRunning }) {
    const results = message.calls?.length ? resultsOf(path, message) : new Map();
    const isLive = this.runs.has(message);
    const options = this.conversation.alternatives(message);
    const calls = (message.calls ?? []).map((call) => results.get(call?.id));
    const canAnswer = message === last && !isRunning && message.calls?.length > 0;
    const look = JSON.stringify([message.changed, isLive, isRunning, canAnswer, sent.has(message), calls, options.map(({ id }) => id)]);
    const known = this.views.get(message.id);
    const isTyping = [...(known?.element.querySelectorAll("textarea") ?? [])].some((area) => area.value !== area.defaultValue);
    if (known?.look === look || (isLive && known?.isLive) || isTyping) return known;
    const actions = this.actions(message, { options, isRunning, canAnswer });
    const View = message.role === "user" ? UserView : AnswerView;
    const view = new View(message, { ...actions, results, isSent: sent.has(message) || message === last });
    Object.assign(view, { look, isLive });
    if (known?.thinking) view.thinking.open = known.thinking.open;
    view.update?.(isLive);
    this.views.set(message.id, view);
    return view;
  }

  actions(message, { options, isRunning, canAnswer }) {
    const isAnswer = message.role === "assistant";
    return {
      alternatives: { index: options.indexOf(message), count: options.length, onPick: (step) => this.pick(options[options.indexOf(message) + step]) },
      onEdit: isRunning || (isAnswer && !message.content) ? null : () => this.hooks.onEdit(message),
      onRetry: isAnswer && !isRunning ? () => this.retry(message) : null,
      onRemove: this.runs.has(message) ? null : () => this.remove(message),
      onResults: canAnswer ? (values) => this.answerCalls(message, values) : null,
    };
  }

  /** The line below what is not sent any more. */
  cutView(message) {
    const known = this.cuts.get(message.cut);
    if (known) return known;
    const undo = () => {
      delete message.cut;
      this.conversation.touch(message);
      this.change();
    };
    const { summary } = message.cut;
    const element = el("div", { class: "cut", role: "note" },
      summary ? el("details", {}, el("summary", {}, "What is above is sent as a summary."), el("p", { dir: "auto" }, summary)) : el("span", {}, "What is above is left out of what is sent."),
      el("button", { type: "button", class: "link", onclick: undo }, "Send it again"));
    this.cuts.set(message.cut, element);
    return element;
  }

  /** Redraw at most once a frame; if redrawing is slow, as for long code, less often, to leave time for other work. */
  draw(message) {
    if (this.frame || !this.views.has(message.id)) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const view = this.views.get(message.id);
      if (!view || !this.runs.has(message)) return;
      const start = performance.now();
      if (start < this.due) return void this.draw(message);
      view.update(true);
      if (this.sticks) this.scrollToEnd();
      this.due = start + (performance.now() - start) * PAUSE;
    });
  }

  scrollToEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** What is shown before the first message; the same nodes as long as the model is the same. */
  welcome() {
    const look = JSON.stringify([this.model?.name, this.model?.has_tools]);
    if (this.welcomed?.look === look) return this.welcomed.element;
    const fitting = EXAMPLES.filter((example) => !example.settings.tools_on || this.model?.has_tools !== false);
    const cards = fitting.map((example) =>
      el("button", { type: "button", class: "card", onclick: () => this.hooks.onExample(example) },
        el("span", { class: "muted small" }, example.title), el("span", {}, example.prompt)));
    const element = el("section", { class: "welcome" }, el("h2", {}, "What shall we weave?"),
      el("p", { class: "muted" }, this.model ? `${this.model.name} is listening.` : ""),
      el("div", { class: "cards" }, ...cards));
    this.welcomed = { look, element };
    return element;
  }
}

/** Make these the children of an element; those that stay are not touched, so that they keep focus and selection. */
function arrange(element, children) {
  const wanted = new Set(children);
  for (const child of [...element.childNodes]) if (!wanted.has(child)) child.remove();
  children.forEach((child, index) => {
    if (element.childNodes[index] !== child) element.insertBefore(child, element.childNodes[index] ?? null);
  });
}

/** Announce the complete answer to screen readers; one that grows token by token cannot be followed. */
function announce(message) {
  const calls = message.calls.map((call) => `Call of ${call.name}.`).join(" ");
  const isCut = message.finish === "stopped" ? "Stopped. " : "";
  byId("announcer").textContent = message.error ?? `${isCut}${message.content} ${calls}`;
}
