// Files that go along with a message: text, code and PDFs, as text in front of the words, and pictures. What is neither is
// refused in words.

import { countTokens } from "./api.js";
import { byId, el, iconButton } from "./dom.js";
import { keepFiles } from "./drafts.js";
import { textOfPdf } from "./pdf.js";
import { MAX_PICTURES, holdsPixels, imageOf, isPicture, maySee, picturesView, readPicture, sees } from "./pictures.js";
import { buildCount } from "./request.js";

const MAX_BYTES = 4_000_000;
const MAX_PDF_BYTES = 50_000_000;

/**
 * @param {File} file
 * @returns {Promise<{name: string, text: string}>}
 * @throws {Error} that says why it cannot be attached
 */
async function read(file) {
  const isPdf = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
  const most = isPdf ? MAX_PDF_BYTES : MAX_BYTES;
  if (file.size > most) throw new Error(`${file.name} is larger than ${most / 1e6} MB.`);
  if (isPdf) {
    const text = await file.arrayBuffer().then(textOfPdf).catch(({ message }) => {
      throw new Error(`${file.name} cannot be read: ${message}.`);
    });
    return { name: file.name, text };
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch { /* told below */ }
  throw new Error(`${file.name} is no text in UTF-8.`);
}

const size = ({ text }) => (text.length < 2000 ? `${text.length} characters` : `${Math.round(text.length / 1000)} k characters`);

/** By picture: the model that has counted its tokens, and a promise of how many they are. */
const counts = new WeakMap();

/**
 * Count the tokens of a picture, once for each model.
 * @param {import("./pictures.js").Picture} picture
 * @param {import("./chat.js").Chat} chat whose model sees
 * @returns {Promise<number>}
 * @throws {import("./api.js").ApiError} status 400: the server refuses the picture
 */
export function countPicture(picture, { model, conversation: { settings } }) {
  const known = counts.get(picture);
  if (known && known.name === model?.name) return known.count;
  const both = [[picture], []].map((files) => countTokens(buildCount([{ role: "user", content: "What is this?", files }], settings, model)));
  const count = Promise.all(both).then(([seen, words]) => seen - words);
  count.catch(({ status }) => status === 400 || counts.delete(picture));
  counts.set(picture, { name: model?.name, count });
  return count;
}

export class Attachments {
  /**
   * @param {import("./chat.js").Chat} chat whose model counts their tokens
   * @param {() => void} onChange
   */
  constructor(chat, onChange) {
    Object.assign(this, { chat, onChange, files: [], isDraft: true });
    /** @type {Promise<boolean>|null} whether all files that are being read can be attached */
    this.reading = null;
    for (const [button, field] of [["attach", "attach-file"], ["add-pictures", "picture-files"]]) {
      byId(button).addEventListener("click", () => byId(field).click());
      byId(field).addEventListener("change", ({ target }) => {
        this.add([...target.files]);
        target.value = "";
      });
    }
    this.listen();
  }

  /** Take what is pasted or dropped anywhere on the page. */
  listen() {
    document.addEventListener("paste", (event) => {
      const { files, types } = event.clipboardData;
      // Of words and cells, office programs also give a picture.
      if (!files.length || ["text/plain", "text/html"].every((type) => types.includes(type))) return;
      event.preventDefault();
      this.add([...files]);
    });
    const { classList } = byId("composer");
    let leaving = 0;
    document.addEventListener("dragover", (event) => {
      event.preventDefault();
      if (!event.dataTransfer.types.includes("Files")) return;
      classList.add("target");
      clearTimeout(leaving);
      leaving = setTimeout(() => classList.remove("target"), 500); // the event comes again while files are held here
    });
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      classList.remove("target");
      this.add([...event.dataTransfer.files]);
    });
  }

  /** Offer pictures if the model sees them. */
  offer() {
    byId("add-pictures").hidden = !sees(this.chat.model);
  }

  /** Whether the model may be given what is attached; says so if not. */
  check() {
    const isFit = maySee(this.chat.model) || !this.files.some(isPicture);
    if (!isFit) this.tell([`${this.chat.model.name} sees no pictures: remove them, or choose another model.`]);
    return isFit;
  }

  /** Read files, behind those that are being read. */
  add(files) {
    const reading = Promise.resolve(this.reading)
      .then(async (isWhole) => (await this.readAll(files)) && isWhole !== false)
      .finally(() => this.reading === reading && (this.reading = null));
    this.reading = reading;
  }

  async readAll(files) {
    const faults = new Set();
    for (const file of files) {
      byId("attached").append(el("li", { class: "file" }, el("span", { class: "name" }, file.name), el("span", { class: "muted" }, "is read…")));
      try {
        const made = await (holdsPixels(file) ? this.readPicture(file) : read(file));
        this.files = [...this.files, made];
        if (file.type === "image/svg+xml" && sees(this.chat.model)) faults.add(`${file.name} goes along as text: pictures must be PNG, JPEG or WebP.`);
      } catch (error) {
        faults.add(error.message);
      }
    }
    this.show();
    this.tell(faults);
    this.onChange();
    return !faults.size;
  }

  readPicture(file) {
    if (!maySee(this.chat.model)) throw new Error(`${this.chat.model.name} sees no pictures, so ${file.name} is not attached.`);
    if (this.files.filter(isPicture).length < MAX_PICTURES) return readPicture(file);
    throw new Error(`A message holds at most ${MAX_PICTURES} pictures; the others are not attached.`);
  }

  tell(faults) {
    const fault = byId("attach-fault");
    fault.textContent = [...new Set([fault.textContent, ...faults])].filter(Boolean).join(" ");
  }

  /** @param {boolean} isDraft whether they belong to a new message, which a reload keeps */
  set(files = [], isDraft = true) {
    Object.assign(this, { files, isDraft });
    this.show();
  }

  show() {
    keepFiles(this.isDraft ? this.files : []);
    byId("attach-fault").textContent = "";
    byId("attached").replaceChildren(...this.files.map((file) => (isPicture(file) ? this.thumbnail(file) : this.chip(file))));
  }

  removeButton(file) {
    return iconButton("close", `Remove ${file.name}`, () => {
      const index = this.files.indexOf(file);
      this.set(this.files.filter((other) => other !== file), this.isDraft);
      this.onChange();
      const buttons = byId("attached").querySelectorAll("button");
      (buttons[Math.min(index, buttons.length - 1)] ?? byId("attach")).focus();
    });
  }

  /** A picture with its tokens in its tooltip, once they are counted; what the server refuses is told before it is sent. */
  thumbnail(file) {
    const image = imageOf(file);
    if (sees(this.chat.model)) {
      countPicture(file, this.chat).then(
        (count) => (image.title = `${file.name}, ${count.toLocaleString("en")} tokens`),
        ({ status, message }) => status === 400 && this.files.includes(file) && this.tell([`${file.name}: ${message}`]),
      );
    }
    return el("li", { class: "thumbnail" }, image, this.removeButton(file));
  }

  /** A file with its size, in tokens once they are counted. */
  chip(file) {
    const length = el("span", { class: "muted" }, size(file));
    const { model } = this.chat.conversation.settings;
    countTokens({ ...(model && { model }), prompt: file.text, add_special_tokens: false }).then(
      (count) => (length.textContent = `${count.toLocaleString("en")} tokens`),
      () => {},
    );
    return el("li", { class: "file" }, el("span", { class: "name" }, file.name), length, this.removeButton(file));
  }
}

/** The files of a message that was sent, pictures first; each can be opened. */
export function fileViews(files = []) {
  const pictures = files.filter(isPicture);
  const texts = files.filter((file) => !isPicture(file));
  const shown = texts.map((file) => el("details", { class: "file" }, el("summary", {}, file.name, " ", el("span", { class: "muted" }, size(file))), el("pre", { tabindex: "0" }, file.text)));
  return pictures.length ? [picturesView(pictures), ...shown] : shown;
}
