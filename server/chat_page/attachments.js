// Files that go along with a message: text, code and PDFs, as text in front of the words. What has no text is refused in
// words.

import { countTokens } from "./api.js";
import { byId, el, iconButton } from "./dom.js";
import { keepFiles } from "./drafts.js";
import { textOfPdf } from "./pdf.js";

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

export class Attachments {
  /**
   * @param {() => string} model that counts their tokens; "" for the first
   * @param {() => void} onChange
   */
  constructor(model, onChange) {
    Object.assign(this, { model, onChange, files: [], isDraft: true });
    byId("attach").addEventListener("click", () => byId("attach-file").click());
    byId("attach-file").addEventListener("change", ({ target }) => {
      this.add([...target.files]);
      target.value = "";
    });
    const composer = byId("composer");
    const given = (data) => [...(data?.files ?? [])];
    composer.addEventListener("paste", (event) => {
      if (!given(event.clipboardData).length) return;
      event.preventDefault();
      this.add(given(event.clipboardData));
    });
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      this.add(given(event.dataTransfer));
    });
  }

  async add(files) {
    const faults = [];
    for (const file of files) {
      byId("attached").append(el("li", { class: "file" }, el("span", { class: "name" }, file.name), el("span", { class: "muted" }, "is read…")));
      try {
        this.files = [...this.files, await read(file)];
      } catch (error) {
        faults.push(error.message);
      }
    }
    this.show();
    byId("attach-fault").textContent = faults.join(" ");
    this.onChange();
  }

  /** @param {boolean} isDraft whether they belong to a new message, which a reload keeps */
  set(files = [], isDraft = true) {
    Object.assign(this, { files, isDraft });
    this.show();
  }

  show() {
    keepFiles(this.isDraft ? this.files : []);
    byId("attach-fault").textContent = "";
    byId("attached").replaceChildren(...this.files.map((file) => this.chip(file)));
  }

  /** A file with its size, in tokens once they are counted. */
  chip(file) {
    const length = el("span", { class: "muted" }, size(file));
    const model = this.model();
    countTokens({ ...(model && { model }), prompt: file.text, add_special_tokens: false }).then(
      (count) => (length.textContent = `${count.toLocaleString("en")} tokens`),
      () => {},
    );
    const remove = iconButton("close", `Remove ${file.name}`, () => {
      this.set(this.files.filter((other) => other !== file), this.isDraft);
      this.onChange();
    });
    return el("li", { class: "file" }, el("span", { class: "name" }, file.name), length, remove);
  }
}

/** The files of a message that was sent; each can be opened. */
export function fileViews(files = []) {
  return files.map((file) => el("details", { class: "file" }, el("summary", {}, file.name, " ", el("span", { class: "muted" }, size(file))), el("pre", { tabindex: "0" }, file.text)));
}
