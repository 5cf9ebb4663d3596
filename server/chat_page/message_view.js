// Shows one message on the page. `update` shows its current state.

import { describe, thoughtFor } from "./answer.js";
import { codeBlock } from "./code.js";
import { copy, el, iconButton } from "./dom.js";
import { pretty } from "./json.js";
import { showMarkdown } from "./markdown.js";
import { showTokens, watchTokens } from "./tokens_view.js";

const ENDS = { length: "Cut off at the token limit.", stopped: "Stopped." };

/** A user's message. */
export function userView(message, { onEdit }) {
  const button = iconButton("copy", "Copy message", () => copy(message.content, button));
  const actions = el("div", { class: "actions" }, button, onEdit && iconButton("edit", "Edit message", onEdit));
  return el("article", { class: "user", "aria-label": "You" }, el("div", { class: "bubble" }, message.content), actions);
}

/** An answer: reasoning, content, calls, error and speed. */
export class AnswerView {
  /**
   * @param {import("./store.js").Message} message
   * @param {object} options
   * @param {Map<string, string>} options.results of calls, by id
   * @param {((results: Map<string, string>) => void)|null} options.onResults null if calls can no longer be answered
   * @param {(() => void)|null} options.onRetry
   */
  constructor(message, { results, onResults, onRetry }) {
    Object.assign(this, { message, results, onResults, onRetry });
    this.reasoning = el("div", { class: "prose" });
    this.summary = el("summary");
    this.thinking = el("details", { class: "thinking" }, this.summary, this.reasoning);
    this.content = el("div", { class: "content prose" });
    this.calls = el("form", { class: "calls", onsubmit: (event) => this.sendResults(event) });
    this.fault = el("p", { class: "error", role: "alert" });
    this.note = el("span", { class: "note" });
    this.actions = el("span", { class: "actions" });
    const foot = el("footer", {}, this.note, this.actions);
    this.element = el("article", { class: "answer", "aria-label": "Weft" }, this.thinking, this.content, this.calls, this.fault, foot);
    this.showsTokens = message.tokens?.length > 0;
  }

  /** @param {boolean} isLive whether the message may still grow */
  update(isLive) {
    const { message } = this;
    const isThinking = isLive && !message.content && !message.calls?.length;
    this.element.classList.toggle("live", isLive);
    this.thinking.hidden = !message.reasoning;
    this.summary.textContent = isThinking ? "Thinking…" : thoughtFor(message.stats);
    this.summary.classList.toggle("pulse", isThinking);
    showMarkdown(this.reasoning, message.reasoning ?? "");
    this.showContent(isLive);
    this.showCalls(isLive);
    this.fault.hidden = !message.error;
    this.fault.textContent = message.error ?? "";
    const end = isLive ? null : ENDS[message.finish];
    this.note.replaceChildren(...[end, ...describe(message.stats ?? {})].filter(Boolean).map((part) => el("span", {}, part)));
    this.actions.replaceChildren(...(isLive ? [] : this.buttons()));
  }

  showContent(isLive) {
    const { message, content } = this;
    this.showsTokens &&= message.tokens?.length > 0;
    if (isLive && message.tokens?.length) this.showsTokens = true;
    const mode = this.showsTokens ? "tokens" : message.is_json ? "json" : "markdown";
    if (content.dataset.mode !== mode) {
      content.replaceChildren();
      content.blocks = [];
      content.dataset.mode = mode;
      if (mode === "tokens") this.watch();
    }
    content.hidden = !message.content && !(isLive && !message.reasoning && !message.calls?.length);
    if (mode === "tokens") showTokens(content.firstChild, message.tokens);
    else if (mode === "json") this.showJson(isLive);
    else showMarkdown(content, message.content);
  }

  watch() {
    const list = el("div", { class: "tokens", role: "group", "aria-label": "Tokens; arrow keys move between them" });
    watchTokens(list);
    this.content.append(list);
  }

  showJson(isLive) {
    const { message, content } = this;
    if (isLive) return void content.replaceChildren(codeBlock(message.content, "json"));
    const { text, isValid } = pretty(message.content);
    const label = isValid ? "✓ valid JSON" : "✗ incomplete JSON";
    content.replaceChildren(codeBlock(text, "json"), el("span", { class: isValid ? "badge" : "badge bad" }, label));
  }

  showCalls(isLive) {
    const calls = (this.message.calls ?? []).filter(Boolean);
    this.calls.hidden = !calls.length;
    const isOpen = calls.every((call) => !this.results.has(call.id) && pretty(call.arguments).isValid); // all arguments are complete
    const canAnswer = !isLive && isOpen && this.onResults;
    this.calls.replaceChildren(...calls.map((call) => this.callView(call, canAnswer)));
    if (canAnswer) {
      this.calls.append(el("button", { type: "submit", class: "primary" }, calls.length > 1 ? "Send results" : "Send result"));
    }
  }

  callView(call, canAnswer) {
    const result = this.results.get(call.id);
    const area = { name: call.id, rows: "2", required: true, "aria-label": `Result of ${call.name}`, placeholder: "What the function returns" };
    return el("section", { class: "call", "aria-label": `Call of ${call.name}` },
      el("h4", {}, "Call ", el("code", {}, call.name)),
      codeBlock(pretty(call.arguments).text, "json"),
      result === undefined ? null : el("p", { class: "result" }, el("b", {}, "Result "), result),
      canAnswer ? el("textarea", area) : null);
  }

  sendResults(event) {
    event.preventDefault();
    this.onResults(new Map(new FormData(this.calls)));
  }

  buttons() {
    const { message } = this;
    const copyButton = iconButton("copy", "Copy answer", () => copy(message.content, copyButton));
    const toggle = iconButton("chart", "Show or hide probabilities", () => {
      this.showsTokens = !this.showsTokens;
      this.showContent(false);
    });
    return [
      message.content ? copyButton : null,
      message.tokens?.length ? toggle : null,
      this.onRetry && iconButton("redo", message.error ? "Try again" : "Regenerate", this.onRetry),
    ].filter(Boolean);
  }
}
