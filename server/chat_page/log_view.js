// The messages of the open conversation on the page. Those that look the same keep their nodes, and so what is typed there.

import { byId, el } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { AnswerView, UserView } from "./message_view.js";
import { isPicture, maySee } from "./pictures.js";
import { resultsOf, sentPath, turnsOf } from "./request.js";

const NEAR_END = 48;
const PAUSE = 4; // between two redraws, in multiples of the duration of the last one

export class LogView {
  /** @param {import("./chat.js").Chat} chat */
  constructor(chat) {
    Object.assign(this, { chat, sticks: true, due: 0, views: new Map(), cuts: new WeakMap(), compared: new Set() });
    this.log = byId("log");
    this.log.addEventListener("scroll", () => {
      this.sticks = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END;
      byId("to-end").hidden = this.sticks;
      byId("alternatives").hidden = true;
    });
    byId("to-end").addEventListener("click", () => this.scrollToEnd());
  }

  /** Forget what another conversation showed. */
  clear() {
    this.views.clear();
    this.compared.clear();
  }

  /** Show all messages. */
  show() {
    const path = this.chat.conversation.path();
    const { isRunning } = this.chat;
    const last = path.at(-1);
    const isOpen = isRunning || (last?.calls?.length > 0 && !last.error); // its turn was sent, and is not over
    const sent = new Set([...sentPath(path), ...(isOpen ? turnsOf(path).at(-1) ?? [] : [])]);
    const state = { path, sent, last, isRunning };
    const shown = path.flatMap((message) => [
      ...(message.role === "tool" ? [] : [this.compared.has(message.parent) ? this.compareView(message, state) : this.view(message, state).element]),
      ...(message.cut ? [this.cutView(message)] : []),
    ]);
    for (const [id, view] of this.views) if (!shown.some((element) => element.contains(view.element))) this.views.delete(id);
    arrange(byId("messages"), shown.length ? shown : [this.welcome()]);
    byId("title").textContent = path.length || this.chat.conversation.titled ? this.chat.conversation.title : "New chat";
    if (this.sticks) this.scrollToEnd();
  }

  /** The view of a message; a new one if it looks different than it did. */
  view(message, { path, sent, last, isRunning }) {
    const results = message.calls?.length ? resultsOf(path, message) : new Map();
    const isLive = this.chat.runs.has(message);
    const options = this.chat.conversation.alternatives(message);
    const calls = (message.calls ?? []).map((call) => results.get(call?.id));
    const canAnswer = message === last && !isRunning && message.calls?.length > 0;
    const isUnseen = Boolean(message.files?.some(isPicture)) && !maySee(this.chat.model);
    const look = JSON.stringify([isUnseen, message.changed, message === last, isLive, isRunning, canAnswer, sent.has(message), calls, options.map(({ id }) => id)]);
    const known = this.views.get(message.id);
    const isTyping = [...(known?.element.querySelectorAll("textarea") ?? [])].some((area) => area.value !== area.defaultValue);
    if (known?.look === look || (isLive && known?.isLive) || isTyping) return known;
    const actions = this.chat.actions(message, { options, isRunning, canAnswer, isLast: message === last });
    const View = message.role === "user" ? UserView : AnswerView;
    const view = new View(message, { ...actions, results, isUnseen, isSent: sent.has(message) || message === last });
    Object.assign(view, { look, isLive });
    if (known?.thinking) view.thinking.open = known.thinking.open;
    view.update?.(isLive);
    this.views.set(message.id, view);
    return view;
  }

  /** Show an answer and its alternatives side by side, or no longer. */
  compare(parent) {
    if (!this.compared.delete(parent)) this.compared.add(parent);
    this.show();
  }

  compareView(message, state) {
    const options = this.chat.conversation.alternatives(message);
    const columns = options.map((option) => el("div", { class: option === message ? "chosen" : null }, this.view(option, state).element,
      option === message ? null : el("button", { type: "button", class: "small", onclick: () => this.chat.pick(option) }, "Go on with this one")));
    return el("div", { class: "compare", role: "group", "aria-label": "Versions side by side" }, ...columns);
  }

  /** The line below what is not sent any more. */
  cutView(message) {
    const known = this.cuts.get(message.cut);
    if (known) return known;
    const undo = () => {
      delete message.cut;
      this.chat.conversation.touch(message);
      this.chat.change();
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
      if (!view || !this.chat.runs.has(message)) return;
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
    const look = JSON.stringify([this.chat.model?.name, this.chat.model?.has_tools]);
    if (this.welcomed?.look === look) return this.welcomed.element;
    const fitting = EXAMPLES.filter((example) => !example.settings.tools_on || this.chat.model?.has_tools !== false);
    const cards = fitting.map((example) =>
      el("button", { type: "button", class: "card", onclick: () => this.chat.hooks.onExample(example) },
        el("span", { class: "muted small" }, example.title), el("span", {}, example.prompt)));
    const element = el("section", { class: "welcome" }, el("h2", {}, "What shall we weave?"),
      el("p", { class: "muted" }, this.chat.model ? `${this.chat.model.name} is listening.` : ""),
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
