// Inline Markdown: emphasis, code, links. Links may lead only to http, https and mailto. Images become links, since
// loading one would tell another host about the reader. Ambiguous text stays as it is.

import { el } from "./dom.js";

const MAX_DEPTH = 6;
const MAX_PARENTHESES = 8; // nested in a URL
const MAX_ADDRESS = 2000; // characters of a bare URL
const IS_WORD = /[\p{L}\p{N}_]/u;
const IS_ESCAPED = /[!-+\-.\/<-@[-`|~]/; // punctuation except , : ; { }, which TeX also writes after a backslash
const IS_OPERAND = /[A-Za-z0-9)\]]/; // a * after it multiplies and begins no emphasis
const IS_ASCII = /[!-~]/;
const URL_START = /^https?:\/\/[^\s<>"'`*|\\]+/;
const TITLE = /(?:\s+(?:"([^"]*)"|'([^']*)'|\(([^()]*)\)))?\s*\)/y;
const TAGS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

/**
 * @param {string} text
 * @returns {Node[]}
 */
export const inline = (text) => parse(text, 0, false);

/** @param {boolean} isLabel whether text is the label of a link, which contains no other link */
function parse(text, depth, isLabel) {
  const nodes = [];
  const state = { ...survey(text), depth, isLabel };
  let plain = "";
  const push = (node) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(node);
  };
  for (let at = 0; at < text.length; ) {
    const found = depth < MAX_DEPTH ? readMarkup(text, at, state) : null;
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

/**
 * Find the markup that binds tighter than emphasis, in one pass.
 * @returns {{codes: Map<number, number>, links: Map<number, object>, isFixed: Uint8Array, absent: Set<string>}}
 * codes: start of code -> its end. links: start of a link -> see `readTarget`. isFixed: characters that are escaped, code
 * or a link and close no emphasis. absent: marks that have no closing mark in the rest, not searched for again.
 */
function survey(text) {
  const [codes, links, isFixed] = [new Map(), new Map(), new Uint8Array(text.length)];
  const unclosed = new Set(); // runs of backticks
  let open = []; // brackets
  for (let at = 0; at < text.length; ) {
    const from = at++;
    const char = text[from];
    if (char === "\\") isFixed[at++] = 1;
    else if (char === "`") {
      at = from + runLength(text, from);
      const end = endOfCode(text, from, at, unclosed);
      if (end < 0) continue;
      codes.set(from, end);
      isFixed.fill(1, from, (at = end));
    } else if (char === "[") open.push(from);
    else if (char === "]" && open.length) {
      const begin = open.pop();
      const target = text[at] === "(" ? readTarget(text, at + 1) : null;
      if (!target) continue;
      links.set(begin, { ...target, label: text.slice(begin + 1, from) });
      isFixed.fill(1, begin, (at = target.end));
      open = [];
    }
  }
  return { codes, links, isFixed, absent: new Set() };
}

/** @returns {{node: Node|string, end: number} | null} */
function readMarkup(text, at, state) {
  switch (text[at]) {
    case "\n":
      return { node: el("br"), end: at + 1 };
    case "\\":
      return IS_ESCAPED.test(text[at + 1] ?? "") ? { node: text[at + 1], end: at + 2 } : null;
    case "`":
      return readCode(text, at, state);
    case "*":
    case "_":
    case "~":
      return readEmphasis(text, at, state);
    case "!":
      return readLink(at + 1, state);
    case "[":
      return readLink(at, state);
    case "<":
    case "h":
      return state.isLabel ? null : readAddress(text, at);
    default:
      return null;
  }
}

/** The next occurrence at or after `from`; remembers that a mark is absent from the rest of the text. */
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

/** The end of the next run with as many backticks as between `from` and `to`; -1 if there is none. */
function endOfCode(text, from, to, absent) {
  const marks = text.slice(from, to);
  let at = find(text, marks, to, absent);
  for (let run; at >= 0; at = find(text, marks, at + run, absent)) {
    run = runLength(text, at);
    if (run === marks.length) return at + run;
  }
  return -1;
}

function readCode(text, at, { codes }) {
  const length = runLength(text, at);
  const end = codes.get(at);
  if (!end) return { node: text.slice(at, at + length), end: at + length };
  const code = text.slice(at + length, end - length).replaceAll("\n", " ");
  const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
  return { node: el("code", {}, isPadded ? code.slice(1, -1) : code), end };
}

/** Whether a run of marks can begin emphasis: not inside a word or a product. */
function canOpen(text, at, length) {
  const [before, behind] = [text[at - 1] ?? " ", text[at + length] ?? " "];
  if (length > 3 || !behind.trim()) return false;
  return text[at] === "_" ? !IS_WORD.test(before) : !(IS_OPERAND.test(before) && IS_ASCII.test(behind));
}

function readEmphasis(text, at, { absent, isFixed, depth, isLabel }) {
  const length = runLength(text, at);
  const mark = text[at].repeat(Math.min(length, 2));
  const tag = TAGS[mark];
  const from = at + mark.length;
  if (!tag || !canOpen(text, at, length)) return { node: text[at].repeat(length), end: at + length };
  for (let end = find(text, mark, from + 1, absent); end >= 0; end = find(text, mark, end + 1, absent)) {
    if (isFixed[end]) continue;
    const run = runLength(text, end);
    const isCloser = text[end - 1].trim() && !(mark[0] === "_" && IS_WORD.test(text[end + run] ?? ""));
    const isOther = mark.length === 1 && run === 2; // a ** inside *
    if (isCloser && !isOther) {
      const close = end + (run > mark.length && run <= 3 ? run - mark.length : 0); // the inner emphasis of *** closes first
      return { node: el(tag, {}, parse(text.slice(from, close), depth + 1, isLabel)), end: close + mark.length };
    }
    if (isOther) end++;
  }
  absent.add(mark);
  return { node: text[at].repeat(length), end: at + length };
}

/**
 * Read what follows `](`: a URL, an optional title, and `)`.
 * @returns {{href: string, address: string, title: string|undefined, end: number} | null} null if the URL is not allowed
 */
function readTarget(text, at) {
  let open = 1;
  let end = at;
  for (; end < text.length && !/\s/.test(text[end]); end++) {
    if (text[end] === "(" && ++open > MAX_PARENTHESES) return null;
    if (text[end] === ")" && --open === 0) break;
  }
  const address = text.slice(at, end);
  TITLE.lastIndex = end;
  const found = TITLE.exec(text);
  const href = found && safeAddress(address);
  return href ? { href, address, title: found[1] ?? found[2] ?? found[3], end: TITLE.lastIndex } : null;
}

function readLink(at, { links, depth, isLabel }) {
  const found = isLabel ? null : links.get(at);
  if (!found) return null;
  const children = parse(found.label.trim() ? found.label : found.address, depth + 1, true);
  return { node: link(found.href, children, found.title), end: found.end };
}

function readAddress(text, at) {
  const isBracketed = text[at] === "<";
  if (!isBracketed && IS_WORD.test(text[at - 1] ?? "")) return null;
  const found = URL_START.exec(text.slice(at + isBracketed, at + MAX_ADDRESS))?.[0];
  if (!found || (isBracketed && text[at + 1 + found.length] !== ">")) return null;
  if (found.length > MAX_ADDRESS - 2) return { node: found, end: at + found.length }; // its end is not known
  const address = isBracketed ? found : found.slice(0, endOfAddress(found));
  const href = safeAddress(address);
  return href ? { node: link(href, [document.createTextNode(address)]), end: at + address.length + 2 * isBracketed } : null;
}

/** A bare URL ends before the punctuation of its sentence, but keeps the closing parenthesis of one that it opens. */
function endOfAddress(address) {
  let surplus = address.split(")").length - address.split("(").length;
  let end = address.length;
  for (; ".,;:!?)]".includes(address[end - 1]); end--) if (address[end - 1] === ")" && surplus-- <= 0) break;
  return end;
}

function safeAddress(address) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return null;
  try {
    return new URL(address).href;
  } catch {
    return null;
  }
}

function link(href, children, title = null) {
  return el("a", { href, title, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}
