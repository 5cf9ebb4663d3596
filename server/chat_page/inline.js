// The part of Markdown inside a line: emphasis, code, links. Links lead to http, https and mailto only; pictures are
// shown as links, since loading one would tell another host who reads.

import { el } from "./dom.js";

const MAX_DEPTH = 6;
const MAX_PARENTHESES = 8; // inside of an address
const IS_WORD = /[\p{L}\p{N}_]/u;
const IS_PUNCTUATION = /[!-/:-@[-`{-~]/;
const URL_START = /^https?:\/\/[^\s<>"'`*|\\]+/;
const TAGS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

/**
 * @param {string} text
 * @returns {Node[]}
 */
export function inline(text, depth = 0) {
  const nodes = [];
  const absent = new Set(); // marks that nothing closes from here on, not searched for again
  let plain = "";
  const push = (node) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(node);
  };
  for (let at = 0; at < text.length; ) {
    const found = depth < MAX_DEPTH ? readMarkup(text, at, absent, depth) : null;
    if (found) {
      if (typeof found.node === "string") plain += found.node;
      else push(found.node);
      at = found.end;
    } else {
      plain += text[at++];
    }
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

/** @returns {{node: Node|string, end: number} | null} */
function readMarkup(text, at, absent, depth) {
  switch (text[at]) {
    case "\n":
      return { node: el("br"), end: at + 1 };
    case "\\":
      return IS_PUNCTUATION.test(text[at + 1] ?? "") ? { node: text[at + 1], end: at + 2 } : null;
    case "`":
      return readCode(text, at, absent);
    case "*":
    case "_":
    case "~":
      return readEmphasis(text, at, absent, depth);
    case "!":
      return text[at + 1] === "[" ? readLink(text, at + 1, absent, depth) : null;
    case "[":
      return readLink(text, at, absent, depth);
    case "<":
    case "h":
      return readAddress(text, at);
    default:
      return null;
  }
}

/** The next occurrence at or behind `from`; what is absent once is absent for the rest of the text. */
function find(text, mark, from, absent) {
  if (absent.has(mark)) return -1;
  const end = text.indexOf(mark, from);
  if (end < 0) absent.add(mark);
  return end;
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end++;
  return end - at;
}

function readCode(text, at, absent) {
  const marks = text.slice(at, at + runLength(text, at));
  let end = find(text, marks, at + marks.length, absent);
  while (end >= 0 && runLength(text, end) !== marks.length) end = find(text, marks, end + runLength(text, end), absent);
  if (end < 0) return { node: marks, end: at + marks.length };
  const code = text.slice(at + marks.length, end).replaceAll("\n", " ");
  const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
  return { node: el("code", {}, isPadded ? code.slice(1, -1) : code), end: end + marks.length };
}

function readEmphasis(text, at, absent, depth) {
  const length = runLength(text, at);
  const mark = text[at].repeat(Math.min(length, 2));
  const tag = TAGS[mark];
  const from = at + mark.length;
  const isInWord = text[at] === "_" && IS_WORD.test(text[at - 1] ?? "");
  if (!tag || length > 3 || isInWord || !(text[from] ?? " ").trim()) return { node: text[at].repeat(length), end: at + length };
  for (let end = find(text, mark, from + 1, absent); end >= 0; end = find(text, mark, end + 1, absent)) {
    const run = runLength(text, end);
    const isCloser = text[end - 1].trim() && !(mark[0] === "_" && IS_WORD.test(text[end + run] ?? ""));
    const isOther = mark.length === 1 && run === 2; // a ** inside of *
    if (isCloser && !isOther) {
      const close = end + (run > mark.length && run <= 3 ? run - mark.length : 0); // the inner of *** closes first
      return { node: el(tag, {}, ...inline(text.slice(from, close), depth + 1)), end: close + mark.length };
    }
    if (isOther) end++;
  }
  absent.add(mark);
  return { node: text[at].repeat(length), end: at + length };
}

function readLink(text, at, absent, depth) {
  const middle = find(text, "](", at + 1, absent);
  if (middle < 0 || text.slice(at + 1, middle).includes("\n\n")) return null;
  const label = text.slice(at + 1, middle);
  if (label.includes("[") && !label.includes("]")) return null; // the link begins further on
  let open = 1;
  let end = middle + 2;
  for (; end < text.length && !/\s/.test(text[end]); end++) {
    if (text[end] === "(" && ++open > MAX_PARENTHESES) return null;
    if (text[end] === ")" && --open === 0) break;
  }
  const address = text.slice(middle + 2, end);
  if (text[end] === " ") end = text.indexOf(")", end); // a title, which is left out
  if (end < 0 || text[end] !== ")") return null;
  const href = safeAddress(address);
  if (!href) return { node: text.slice(at, end + 1), end: end + 1 };
  return { node: link(href, inline(label, depth + 1)), end: end + 1 };
}

function readAddress(text, at) {
  const isBracketed = text[at] === "<";
  if (!isBracketed && IS_WORD.test(text[at - 1] ?? "")) return null;
  const found = URL_START.exec(text.slice(at + isBracketed, at + 2000));
  if (!found || (isBracketed && text[at + 1 + found[0].length] !== ">")) return null;
  const address = isBracketed ? found[0] : found[0].replace(/[.,;:!?)\]]+$/, "");
  const href = safeAddress(address);
  return href ? { node: link(href, [document.createTextNode(address)]), end: at + address.length + 2 * isBracketed } : null;
}

function safeAddress(address) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return null;
  try {
    return new URL(address).href;
  } catch {
    return null;
  }
}

const link = (href, children) => el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
