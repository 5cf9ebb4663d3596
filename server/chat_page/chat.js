// The open conversation: its messages on the page, and its request, if one is running.

import { Answer, newAnswer } from "./answer.js";
import { ApiError, streamChat } from "./api.js";
import { byId, el } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { AnswerView, userView } from "./message_view.js";
import { Fault, buildBody } from "./request.js";
import { askForKey, showSection } from "./settings_view.js";
import { current, newConversation, newName, settings, writeConversation } from "./store.js";

const NEAR_END = 48;
const TITLE_LENGTH = 48;
const PAUSE = 4; // between two redraws, in multiples of the duration of the last one

export class Chat {
  /**
   * @param {object} hooks
   * @param {() => void} hooks.onChange after a change that the list of conversations shows
   * @param {(isRunning: boolean) => void} hooks.onRun
   * @param {(message: object) => void} hooks.onEdit
   * @param {(example: object) => void} hooks.onExample
   */
  constructor(hooks) {
    Object.assign(this, { hooks, conversation: newConversation(), abort: null, stats: null, sticks: true, due: 0 });
    this.log = byId("log");
    this.log.addEventListener("scroll", () => {
      this.sticks = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END;
      byId("to-end").hidden = this.sticks;
      byId("alternatives").hidden = true;
    });
    byId("to-end").addEventListener("click", () => this.scrollToEnd());
  }

  get messages() {
    return this.conversation.messages;
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    current.write(conversation.id);
    this.show();
    this.scrollToEnd();
    this.hooks.onChange();
  }

  // --- asking ------------------------------------------------------------------------------------------------------

  /**
   * Request an answer to these messages, which replace the conversation's.
   * @throws {Fault} before anything is sent or changed
   */
  ask(messages) {
    const body = buildBody(messages, this.stats);
    const { conversation } = this;
    conversation.messages = messages;
    conversation.title ||= titleOf(messages);
    messages.findLast((each) => each.role === "user").turn ??= newName();
    const message = { ...newAnswer(), is_json: settings.schema_on };
    messages.push(message);
    this.save(conversation, message);
    this.show(message);
    this.scrollToEnd();
    this.run(conversation, message, body);
  }

  async run(conversation, message, body) {
    const abort = (this.abort = new AbortController());
    const answer = new Answer(message);
    this.hooks.onRun(true);
    let error = null;
    try {
      for await (const chunk of streamChat(body, abort.signal)) {
        answer.add(chunk);
        this.draw(message);
      }
    } catch (caught) {
      if (abort.signal.aborted) message.finish = "stopped";
      else error = caught;
    }
    if (error) message.error = error.message;
    if (error && !(error instanceof ApiError)) console.error(error);
    this.save(conversation, message);
    if (this.abort === abort) {
      this.abort = null;
      this.hooks.onRun(false);
      this.show();
      if (conversation === this.conversation) announce(message);
    }
    if (error?.status === 401 && (await askForKey(error.message)) && message === this.messages.at(-1)) this.retry();
  }

  stop() {
    this.abort?.abort();
  }

  /** Save the part of the answer that has arrived, when the page is closed. */
  leave() {
    if (!this.abort || this.abort.signal.aborted) return;
    const { message } = this.liveView;
    message.finish = "stopped";
    this.save(this.conversation, message);
  }

  /** Request another answer to the user's last message or the last results. */
  retry() {
    if (!this.abort) this.attempt(() => this.ask(this.messages.slice(0, -1)));
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

  answerCalls(message, results) {
    const answers = message.calls.map((call) => ({ role: "tool", call_id: call.id, content: results.get(call.id) }));
    this.attempt(() => this.ask([...this.messages, ...answers]));
  }

  /** Save a conversation after a change of its answer `message`. */
  save(conversation, message) {
    if (conversation.isDeleted) return;
    conversation.time = message.changed = Math.max(Date.now(), conversation.time + 1); // even if the clock goes back
    if (!writeConversation(conversation)) {
      byId("announcer").textContent = "The browser's storage is full: this conversation is not saved.";
    }
    this.hooks.onChange();
  }

  /** Merge what another tab has saved. Not during an answer or while results are typed: those end with a save anyway. */
  sync() {
    const isWriting = [...this.log.querySelectorAll("textarea")].some((area) => area.value);
    if (this.abort || isWriting || !this.messages.length) return;
    writeConversation(this.conversation);
    this.show();
  }

  // --- showing -----------------------------------------------------------------------------------------------------

  /** Show all messages; `live` is the one that is still growing, if any. */
  show(live = null) {
    const results = new Map(this.messages.filter((m) => m.role === "tool").map((m) => [m.call_id, m.content]));
    const last = this.messages.at(-1);
    const lastUser = this.messages.findLast((message) => message.role === "user");
    const isIdle = live === null;
    const views = this.messages.map((message) => {
      if (message.role === "tool") return null;
      if (message.role === "user") {
        const onEdit = isIdle && message === lastUser ? () => this.hooks.onEdit(message) : null;
        return userView(message, { onEdit });
      }
      const isLast = message === last && isIdle;
      const view = new AnswerView(message, {
        results,
        onResults: isLast ? (values) => this.answerCalls(message, values) : null,
        onRetry: isLast ? () => this.retry() : null,
      });
      view.thinking.open = this.liveView?.message === message && this.liveView.thinking.open;
      view.update(message === live);
      if (message === live) this.liveView = view;
      return view.element;
    });
    byId("messages").replaceChildren(...views.filter(Boolean), ...(this.messages.length ? [] : [this.welcome()]));
    byId("alternatives").hidden = true;
    byId("title").textContent = this.conversation.title || "New chat";
    if (this.sticks) this.scrollToEnd();
  }

  /** Redraw at most once a frame; if redrawing is slow, as for long code, less often, to leave time for other work. */
  draw(message) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.liveView?.message !== message || !this.abort) return;
      const start = performance.now();
      if (start < this.due) return void this.draw(message);
      this.liveView.update(true);
      if (this.sticks) this.scrollToEnd();
      this.due = start + (performance.now() - start) * PAUSE;
    });
  }

  scrollToEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  welcome() {
    const cards = EXAMPLES.map((example) =>
      el("button", { type: "button", class: "card", onclick: () => this.hooks.onExample(example) },
        el("span", { class: "muted small" }, example.title), el("span", {}, example.prompt)));
    return el("section", { class: "welcome" }, el("h2", {}, "What shall we weave?"),
      el("p", { class: "muted" }, this.stats ? `${this.stats.model} is listening.` : ""),
      el("div", { class: "cards" }, ...cards));
  }
}

function titleOf(messages) {
  const text = messages[0].content.trim().split("\n")[0];
  return text.length > TITLE_LENGTH ? `${text.slice(0, TITLE_LENGTH)}…` : text || "Chat";
}

/** Announce the complete answer to screen readers; one that grows token by token cannot be followed. */
function announce(message) {
  const calls = message.calls.map((call) => `Call of ${call.name}.`).join(" ");
  const isCut = message.finish === "stopped" ? "Stopped. " : "";
  byId("announcer").textContent = message.error ?? `${isCut}${message.content} ${calls}`;
}
