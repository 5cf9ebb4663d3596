// Code blocks with language, copy button and simple highlighting: strings, comments, numbers, and words that are
// reserved in many languages.

import { copy, el, iconButton } from "./dom.js";

const WORDS =
  "abstract and as assert async await bool break case catch char class const continue def default del do double elif else " +
  "enum except export extends false False final finally float fn for from func function global if impl import in int " +
  "interface is lambda let long match mod mut new nil None nonlocal not null of or pass pub public private raise return " +
  "self static string struct super switch this throw trait true True try type typeof undefined use var void while with yield";
const RESERVED = new Set(WORDS.split(" "));
const WITH_HASHES = new Set(["python", "py", "sh", "bash", "shell", "yaml", "yml", "toml", "ruby", "rb", "r", "perl", "make"]);
const STRINGS = `"(?:\\\\.|[^"\\\\\\n])*"?|'(?:\\\\.|[^'\\\\\\n])*'?|\`(?:\\\\.|[^\`\\\\])*\`?`;
const PARTS = (comment) => new RegExp(`(${comment})|(${STRINGS})|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
const SLASHES = PARTS("//.*|/\\*[^]*?(?:\\*/|$)");
const HASHES = PARTS("#.*");
const CLASSES = ["comment", "text", "number", "word"];
const MAX_COLOURED = 20_000;

/**
 * @param {string} code
 * @param {string} info the text after the fence, the language first; may be empty
 * @returns {HTMLElement}
 */
export function codeBlock(code, info) {
  const [language] = info.split(/\s/);
  const button = iconButton("copy", "Copy code", () => copy(code, button));
  const head = el("div", { class: "code-head" }, el("span", {}, info || "text"), button);
  return el("div", { class: "code-block" }, head, el("pre", { tabindex: "0" }, el("code", {}, ...coloured(code, language))));
}

function coloured(code, language) {
  if (!language || code.length > MAX_COLOURED || /^(text|plain|txt|md|markdown)$/i.test(language)) return [code];
  const parts = [];
  let end = 0;
  for (const found of code.matchAll(WITH_HASHES.has(language.toLowerCase()) ? HASHES : SLASHES)) {
    const kind = found.slice(1).findIndex((group) => group !== undefined);
    if (kind === 3 && !RESERVED.has(found[0])) continue;
    parts.push(code.slice(end, found.index), el("span", { class: `code-${CLASSES[kind]}` }, found[0]));
    end = found.index + found[0].length;
  }
  return [...parts, code.slice(end)];
}
