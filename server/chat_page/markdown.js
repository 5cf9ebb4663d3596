// Markdown -> DOM nodes. Every character of the input becomes text, the target or title of a checked link, or dropped
// markup; HTML in the input is plain text. Work is linear in the input, times the depth of nesting, at most MAX_DEPTH.

import { el } from "./dom.js";
import { codeBlock } from "./code.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 8;
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|(?:0|[1-9]\d{0,8})[.)])( {1,4}|$)/;

/** @typedef {{raw: string, build: () => Node}} Block raw is the source: equal sources make equal nodes. */

/**
 * Show text in an element. Unchanged blocks keep their nodes, so that a stream does not disturb them.
 * @param {HTMLElement & {blocks?: string[]}} element
 * @param {string} text
 */
export function showMarkdown(element, text) {
  const known = element.blocks ?? [];
  const blocks = readBlocks(linesOf(text), 0);
  let same = 0;
  while (same < known.length && same < blocks.length && known[same] === blocks[same].raw) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const block of blocks.slice(same)) element.append(block.build());
  element.blocks = blocks.map((block) => block.raw);
}

/** Split into lines, with tabs as four spaces; code keeps its tabs, except in a list or a quote. */
function linesOf(text) {
  let marks = ""; // of the fence that is open
  return text.split(/\r?\n/).map((line) => {
    if (marks) {
      if (isFenceEnd(line, marks)) marks = "";
      return line;
    }
    const fence = FENCE.exec(line);
    if (fence?.[1] === "") marks = fence[2];
    return line.replaceAll("\t", "    ");
  });
}

/** @returns {Block[]} */
function readBlocks(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [end, build] = readBlock(lines, at, depth);
    blocks.push({ raw: lines.slice(at, end).join("\n"), build });
    at = end;
  }
  return blocks;
}

const nodes = (lines, depth) => readBlocks(lines, depth).map((block) => block.build());

/** @returns {[number, () => Node]} the line after the block, and a function that makes its node */
function readBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return readCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = heading[2].replace(/ #+ *$/, "");
    return [at + 1, () => el(`h${Math.min(heading[1].length + 2, 6)}`, {}, inline(text))];
  }
  if (RULE.test(line)) return [at + 1, () => el("hr")];
  if (depth < MAX_DEPTH && QUOTE.test(line)) {
    const end = endOf(lines, at, (other) => QUOTE.test(other));
    const inner = lines.slice(at, end).map((other) => other.replace(QUOTE, ""));
    return [end, () => el("blockquote", {}, nodes(inner, depth + 1))];
  }
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth);
  if (isTable(lines, at)) return readTable(lines, at);
  const end = endOf(lines, at + 1, (other, index) => other.trim() && !beginsBlock(lines, index, depth));
  return [end, () => el("p", {}, inline(lines.slice(at, end).join("\n").trim()))];
}

function endOf(lines, at, belongs) {
  while (at < lines.length && belongs(lines[at], at)) at++;
  return at;
}

function beginsBlock(lines, at, depth) {
  const line = lines[at];
  const nests = depth < MAX_DEPTH && (QUOTE.test(line) || isFirstItem(line));
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || nests || isTable(lines, at);
}

/** Whether a line may begin a list within a paragraph: "in\n1984. It was" may not. */
function isFirstItem(line) {
  const item = ITEM.exec(line);
  return item && line.length > item[0].length && (/[-*+]/.test(item[2]) || /^1\D/.test(item[2]));
}

const isFenceEnd = (line, marks) => line.trim().length >= marks.length && line.trim().replaceAll(marks[0], "") === "";

function readCode(lines, at, [, indent, marks, info]) {
  const end = endOf(lines, at + 1, (line) => !isFenceEnd(line, marks)); // an unclosed fence extends to the end
  const code = lines.slice(at + 1, end).map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line));
  return [Math.min(end + 1, lines.length), () => codeBlock(code.join("\n"), info.trim())];
}

function readList(lines, at, depth) {
  const [, { length: margin }, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const isItem = (line) => {
    const item = ITEM.exec(line);
    return item && item[1].length <= margin + 1 && /\d/.test(item[2]) === isOrdered && !RULE.test(line);
  };
  const items = [];
  while (at < lines.length && isItem(lines[at])) {
    const item = ITEM.exec(lines[at]);
    const width = item[0].length;
    const inner = [lines[at].slice(width)];
    for (at++; at < lines.length; at++) {
      for (const next = endOfInner(lines, at, item[1].length + 2); at < next; at++) inner.push(lines[at].slice(width));
      if (isBlank(lines[at])) break;
      const isInner = lines[at].startsWith(" ".repeat(Math.min(width, item[1].length + 2)));
      const goesOn = inner.at(-1).trim() && !beginsBlock(lines, at, depth) && !isItem(lines[at]);
      if (!isInner && !goesOn) break;
      inner.push(isInner ? lines[at].slice(Math.min(width, lines[at].search(/\S|$/))) : lines[at]);
    }
    items.push({ number: Number.parseInt(item[2], 10), inner });
    const next = endOf(lines, at, isBlank);
    if (next < lines.length && isItem(lines[next])) at = next;
  }
  return [at, () => (isOrdered ? orderedList(items, depth) : el("ul", {}, items.map(({ inner }) => listItem(inner, depth))))];
}

const isBlank = (line) => !line.trim();

/** The line after the blank lines at `at`, if it belongs to an item whose content begins at this column; else `at`. */
function endOfInner(lines, at, column) {
  const next = endOf(lines, at, isBlank);
  return next < lines.length && lines[next].startsWith(" ".repeat(column)) ? next : at;
}

/** Keeps the numbers of the source. */
function orderedList(items, depth) {
  const numbers = items.map(({ number }) => number);
  const [first] = numbers;
  const list = el("ol", { start: first !== 1 ? first : null });
  items.forEach(({ number, inner }, index) => {
    const item = listItem(inner, depth);
    if (index && number !== numbers[index - 1] + 1) item.setAttribute("value", number);
    list.append(item);
  });
  const numDigits = `${numbers.reduce((a, b) => Math.max(a, b))}`.length;
  if (numDigits > 2) list.style.setProperty("padding-left", `${numDigits + 2}ch`);
  return list;
}

function listItem(lines, depth) {
  const children = nodes(lines, depth + 1);
  const [first, ...others] = children;
  return el("li", {}, first?.tagName === "P" ? [...first.childNodes, ...others] : children); // the first paragraph becomes plain text
}

const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const rule = cells(lines[at + 1]);
  return rule.length === cells(lines[at]).length && rule.every((cell) => /^:?-+:?$/.test(cell));
}

function readTable(lines, at) {
  const end = endOf(lines, at + 2, (line) => line.includes("|"));
  const row = (line, tag) => el("tr", {}, cells(line).map((cell) => el(tag, {}, inline(cell))));
  const build = () =>
    el("div", { class: "table" }, el("table", {},
      el("thead", {}, row(lines[at], "th")),
      el("tbody", {}, lines.slice(at + 2, end).map((line) => row(line, "td")))));
  return [end, build];
}
