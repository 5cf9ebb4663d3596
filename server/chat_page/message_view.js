// Shows one message on the page. `update` shows its current state.

import { describe, thoughtFor } from "./answer.js";
import { fileViews } from "./attachments.js";
import { codeBlock } from "./code.js";
import { ALIVE_MS } from "./conversation.js";
import { copy, el, iconButton } from "./dom.js";
import { pretty } from "./json.js";
import { showMarkdown } from "./markdown.js";
import { showTokens, watchTokens } from "./tokens_view.js";

const ENDS = { length: "Cut off at the token limit.", stopped: "Stopped.", interrupted: "Interrupted: the page was closed." };

/** Why an answer ended; one without an end grows in another tab, or its page is gone. */
function endOf({ finish, changed }) {
  if (finish) return ENDS[finish];
  return Date.now() < changed + ALIVE_MS ? "Another tab is writing this." : "Interrupted.";
}

/**
 * @typedef {object} Actions null: it cannot be done now
 * @property {{index: number, count: number, onPick: (step: number) => void}} alternatives
 * @property {(() => void)|null} onEdit
 * @property {(() => void)|null} onRetry
 * @property {(() => void)|null} onRemove
 * @property {((results: Map<string, string>, given: Map<string, string>) => void)|null} onResults with edited arguments
 * @property {(() => void)|null} onContinue lets an answer that was cut go on
 * @property {boolean} isSent whether the model gets to see it
 * @property {boolean} isUnseen whether it has pictures, and the model does not see them
 */

/** The switch between a message and its alternatives. */
function switcher({ index, count, onPick, onCompare }) {
  if (count < 2) return null;
  const button = (name, label, step, isOff) => Object.assign(iconButton(name, label, () => onPick(step)), { disabled: isOff });
  return el("span", { class: "switch", role: "group", "aria-label": "Versions" },
    button("left", "Previous version", -1, index === 0),
    el("span", {}, `${index + 1}/${count}`),
    button("right", "Next version", 1, index === count - 1),
    onCompare && iconButton("columns", "Side by side", onCompare));
}

const UNSENT = "Not sent to the model: it has no answer.";
const UNSEEN = "This model sees no pictures: it gets their names.";

/** The parameters of the request that an answer came of. */
function askedView({ model, ...parameters } = {}) {
  if (!model) return null;
  const named = Object.entries(parameters).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`);
  return el("details", { class: "asked" }, el("summary", {}, "Parameters"), el("p", {}, [`model ${model}`, ...named].join(" · ")));
}

/** A call that the server made. */
const hostedView = ({ server, name, arguments: given, result }) =>
  el("details", { class: "file" }, el("summary", {}, name || "No tools", " ", el("span", { class: "muted" }, server)),
    given ? codeBlock(pretty(given).text, "json") : null, el("p", { class: "result", dir: "auto" }, result));

/** A user's message. */
export class UserView {
  /** @param {import("./conversation.js").Message} message @param {Actions} actions */
  constructor(message, { alternatives, onEdit, onRemove, isSent, isUnseen }) {
    this.message = message;
    const button = iconButton("copy", "Copy message", () => copy(message.content, button));
    const buttons = el("div", { class: "actions" }, button, onEdit && iconButton("edit", "Edit message", onEdit),
      onRemove && iconButton("trash", "Delete message", onRemove));
    this.element = el("article", { class: isSent ? "user" : "user unsent", "aria-label": "You" },
      ...fileViews(message.files),
      message.content ? el("div", { class: "bubble", dir: "auto" }, message.content) : null,
      el("div", { class: "below" }, isSent && !isUnseen ? null : el("span", { class: "muted" }, isSent ? UNSEEN : UNSENT), buttons, switcher(alternatives)));
  }
}

/** An answer: reasoning, content, calls, error and speed. */
export class AnswerView {
  /**
   * @param {import("./conversation.js").Message} message
   * @param {Actions & {results: Map<string, string>}} actions and the results of calls, by id
   */
  constructor(message, actions) {
    const { results, onResults } = actions;
    Object.assign(this, { message, actions, results, onResults });
    this.reasoning = el("div", { class: "prose" });
    this.summary = el("summary");
    this.thinking = el("details", { class: "thinking" }, this.summary, this.reasoning);
    this.hosted = el("div", { class: "hosted" });
    this.content = el("div", { class: "content prose" });
    this.calls = el("form", { class: "calls", onsubmit: (event) => this.sendResults(event) });
    this.fault = el("p", { class: "error", role: "alert" });
    this.note = el("div", { class: "note" });
    this.buttons = el("span", { class: "actions" });
    const foot = el("footer", {}, this.note, this.buttons, switcher(actions.alternatives));
    this.element = el("article", { class: "answer", "aria-label": "Weft" }, this.thinking, this.hosted, this.content, this.calls, this.fault, foot);
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
    showMarkdown(this.reasoning, message.reasoning ?? "", isLive);
    this.hosted.append(...(message.hosted ?? []).slice(this.hosted.childElementCount).map(hostedView));
    this.showContent(isLive);
    this.showCalls(isLive);
    this.fault.hidden = !message.error;
    this.fault.textContent = message.error ?? "";
    const parts = [isLive ? null : endOf(message), message.is_edited && "Edited.", ...describe(message.stats ?? {})];
    const asked = isLive ? null : askedView(message.asked);
    const goOn = isLive || !this.actions.onContinue ? null : el("button", { type: "button", class: "link", onclick: this.actions.onContinue }, "Continue");
    const [end, ...figures] = parts.map((part) => part && el("span", {}, part));
    this.note.replaceChildren(...[end, goOn, ...figures, asked].filter(Boolean));
    this.buttons.replaceChildren(...(isLive ? [] : this.makeButtons()));
  }

  showContent(isLive) {
    const { message, content } = this;
    this.showsTokens &&= message.tokens?.length > 0;
    if (isLive && message.tokens?.length) this.showsTokens = true;
    const mode = this.showsTokens ? "tokens" : message.is_json ? "json" : "markdown";
    if (content.dataset.mode !== mode) {
      content.replaceChildren();
      content.shown = null;
      content.dataset.mode = mode;
      if (mode === "tokens") this.watch();
    }
    content.hidden = !message.content && !(isLive && !message.reasoning && !message.calls?.length);
    if (mode === "tokens") showTokens(content.firstChild, message.tokens);
    else if (mode === "json") this.showJson(isLive);
    else showMarkdown(content, message.content, isLive);
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
    const area = { name: `result ${call.id}`, rows: "2", required: true, "aria-label": `Result of ${call.name}`, placeholder: "What the function returns" };
    const { text } = pretty(call.arguments);
    const given = el("div", {}, codeBlock(text, "json"));
    const edit = iconButton("edit", `Edit the arguments of ${call.name}`, () => {
      const field = { name: `given ${call.id}`, class: "code", rows: `${text.split("\n").length + 1}`, spellcheck: "false", "aria-label": `Arguments of ${call.name}` };
      const input = el("textarea", field, text);
      given.replaceChildren(input);
      edit.remove();
      input.focus();
    });
    return el("section", { class: "call", "aria-label": `Call of ${call.name}` },
      el("div", { class: "row" }, el("p", { class: "call-name" }, "Call ", el("code", {}, call.name)), canAnswer ? edit : null),
      given,
      result === undefined ? null : el("p", { class: "result" }, el("b", {}, "Result "), result),
      canAnswer ? el("textarea", area) : null);
  }

  sendResults(event) {
    event.preventDefault();
    const fields = [...new FormData(this.calls)];
    const of = (kind) => new Map(fields.filter(([name]) => name.startsWith(`${kind} `)).map(([name, value]) => [name.slice(kind.length + 1), value]));
    const given = of("given");
    for (const [id, text] of given) {
      const input = this.calls.elements.namedItem(`given ${id}`);
      input.setCustomValidity(pretty(text).isValid ? "" : "This is not valid JSON.");
      input.oninput = () => input.setCustomValidity("");
    }
    if (this.calls.reportValidity()) this.onResults(of("result"), given);
  }

  makeButtons() {
    const { message, actions: { onEdit, onRetry, onRemove } } = this;
    const copyButton = iconButton("copy", "Copy answer", () => copy(message.content, copyButton));
    const toggle = iconButton("chart", "Show or hide probabilities", () => {
      this.showsTokens = !this.showsTokens;
      this.showContent(false);
    });
    return [
      message.content ? copyButton : null,
      message.tokens?.length ? toggle : null,
      onEdit && iconButton("edit", "Edit answer", onEdit),
      onRetry && iconButton("redo", message.error ? "Try again" : "Regenerate", onRetry),
      onRemove && iconButton("trash", "Delete answer", onRemove),
    ].filter(Boolean);
  }
}
