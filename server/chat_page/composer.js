// The field for the next message: its draft, a message that is edited, and what was said before.

import { Attachments } from "./attachments.js";
import { byId } from "./dom.js";
import { draft } from "./local.js";

const input = byId("input");

export class Composer {
  /**
   * @param {import("./chat.js").Chat} chat
   * @param {() => void} onWrite after every change of what is written
   */
  constructor(chat, onWrite) {
    Object.assign(this, { chat, onWrite, edited: null, recalled: -1 });
    /** @type {Promise|null} a conversation that is being read, and will be the open one */
    this.opening = null;
    this.attachments = new Attachments(chat, onWrite);
    input.addEventListener("input", () => {
      this.recalled = -1;
      this.fit();
    });
    input.addEventListener("keydown", (event) => this.press(event));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    byId("cancel-edit").addEventListener("click", () => this.cancelEdit());
  }

  focus() {
    input.focus();
  }

  /** @returns {{content: string, files?: object[]}} the message as it would be sent */
  get values() {
    const { files } = this.attachments;
    return { content: input.value, ...(files.length && { files }) };
  }

  fit() {
    byId("editing").hidden = !this.edited;
    byId("editing-what").textContent = this.edited?.role === "assistant" ? "Editing an answer" : "Editing your message";
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight}px`;
    draft.write(this.edited ? "" : input.value);
    this.onWrite();
  }

  write(text) {
    input.value = text;
    this.fit();
    input.focus();
  }

  /** Put words behind what is written; on a phone, do not open the keyboard. */
  append(text) {
    this.recalled = -1;
    input.value += (/\S$/.test(input.value) ? " " : "") + text;
    this.fit();
    if (matchMedia("(hover: hover)").matches) input.focus();
  }

  press(event) {
    if (event.isComposing || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
    if (event.key === "Enter") {
      event.preventDefault();
      this.submit();
    } else if (event.key === "ArrowUp" || event.key === "ArrowDown") this.recall(event);
  }

  /** Show what was said before, from an empty field on; at its end the field is empty again. */
  recall(event) {
    if (this.edited || (input.value && this.recalled < 0)) return;
    const said = this.chat.conversation.path().filter(({ role }) => role === "user").map(({ content }) => content).reverse();
    const next = this.recalled + (event.key === "ArrowUp" ? 1 : -1);
    if (next < -1 || next >= said.length) return;
    event.preventDefault();
    this.recalled = next;
    this.write(said[next] ?? "");
  }

  edit(message) {
    this.edited = message;
    this.attachments.set(message.files, false);
    this.write(message.content);
  }

  /** Send the text, or keep it if a field of the panel is invalid. It belongs to the conversation that was asked for last. */
  submit() {
    if (this.opening) return void this.opening.then(() => this.submit());
    const { chat, edited, values, attachments } = this;
    if (attachments.reading) return void attachments.reading.then((isWhole) => isWhole && this.submit());
    if (!attachments.check()) return;
    if (!(values.content.trim() || values.files) || chat.isRunning) return;
    if (edited?.role === "assistant") chat.rewrite(edited, values.content);
    else if (!chat.attempt(() => chat.ask(values, edited))) return;
    this.clear();
  }

  clear() {
    this.edited = null;
    this.attachments.set();
    byId("speech-fault").textContent = "";
    this.recalled = -1;
    this.write("");
  }

  cancelEdit() {
    this.clear();
  }

  /** Another conversation is shown: what was edited in the last one is not edited any more. */
  reset() {
    if (this.edited) input.value = "";
    if (this.edited) this.attachments.set();
    this.edited = null;
    this.recalled = -1;
    this.fit();
  }
}
