// Markdown -> DOM nodes. Every character of the input ends as a text node, as the target of a checked link, or as
// markup that is dropped; HTML in the input is text like any other. Work is linear in the input but for nesting, which
// ends at MAX_DEPTH.

import { el } from "./dom.js";
import { codeBlock } from "./code.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 8;
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( {1,4}|\t|$)/;

/** @typedef {{raw: string, build: () => Node}} Block raw is the source: equal sources are equal nodes. */

/**
 * Show text in an element; blocks that have not changed keep their nodes, so that a stream does not disturb them.
 * @param {HTMLElement & {blocks?: string[]}} element
 * @param {string} text
 */
export function showMarkdown(element, text) {
  const known = element.blocks ?? [];
  const blocks = readBlocks(text.replaceAll("\t", "    ").split("\n"), 0);
  let same = 0;
  while (same < known.length && same < blocks.length && known[same] === blocks[same].raw) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...blocks.slice(same).map((block) => block.build()));
  element.blocks = blocks.map((block) => block.raw);
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

/** @returns {[number, () => Node]} the line behind the block, and what makes its node */
function readBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return readCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = heading[2].replace(/ #+ *$/, "");
    return [at + 1, () => el(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(text))];
  }
  if (RULE.test(line)) return [at + 1, () => el("hr")];
  if (depth < MAX_DEPTH && QUOTE.test(line)) {
    const end = endOf(lines, at, (other) => QUOTE.test(other));
    const inner = lines.slice(at, end).map((other) => other.replace(QUOTE, ""));
    return [end, () => el("blockquote", {}, ...nodes(inner, depth + 1))];
  }
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth);
  if (isTable(lines, at)) return readTable(lines, at);
  const end = endOf(lines, at + 1, (other, index) => other.trim() && !beginsBlock(lines, index, depth));
  return [end, () => el("p", {}, ...inline(lines.slice(at, end).join("\n").trim()))];
}

function endOf(lines, at, belongs) {
  while (at < lines.length && belongs(lines[at], at)) at++;
  return at;
}

function beginsBlock(lines, at, depth) {
  const line = lines[at];
  const nests = depth < MAX_DEPTH && (QUOTE.test(line) || ITEM.test(line));
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || nests || isTable(lines, at);
}

function readCode(lines, at, [, indent, marks, info]) {
  const isEnd = (line) => line.trim().length >= marks.length && line.trim().replaceAll(marks[0], "") === "";
  const end = endOf(lines, at + 1, (line) => !isEnd(line)); // an unclosed fence goes on to the end
  const code = lines.slice(at + 1, end).map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line));
  return [Math.min(end + 1, lines.length), () => codeBlock(code.join("\n"), info.trim().split(/\s/)[0])];
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
      const isInner = lines[at].startsWith(" ".repeat(Math.min(width, item[1].length + 2)));
      const isBlank = !lines[at].trim();
      const goesOn = inner.at(-1).trim() && !beginsBlock(lines, at, depth);
      if (isBlank ? !follows(lines, at, item[1].length + 2) : !isInner && !goesOn) break;
      inner.push(isInner ? lines[at].slice(Math.min(width, lines[at].search(/\S|$/))) : lines[at]);
    }
    items.push(inner);
    const next = endOf(lines, at, (line) => !line.trim());
    if (next < lines.length && isItem(lines[next])) at = next;
  }
  const first = Number.parseInt(mark, 10);
  const build = () =>
    el(isOrdered ? "ol" : "ul", { start: isOrdered && first !== 1 ? first : null }, ...items.map((inner) => listItem(inner, depth)));
  return [at, build];
}

/** Whether the next line that is not blank belongs into an item whose content begins at this column. */
function follows(lines, at, column) {
  const next = endOf(lines, at, (line) => !line.trim());
  return next < lines.length && lines[next].startsWith(" ".repeat(column));
}

function listItem(lines, depth) {
  const children = nodes(lines, depth + 1);
  if (children[0]?.tagName === "P") children.splice(0, 1, ...children[0].childNodes); // a tight list has no paragraphs
  return el("li", {}, ...children);
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return false;
  const rule = cells(lines[at + 1]);
  return rule.length === cells(lines[at]).length && rule.every((cell) => /^:?-+:?$/.test(cell));
}

function readTable(lines, at) {
  const end = endOf(lines, at + 2, (line) => line.includes("|"));
  const row = (line, tag) => el("tr", {}, ...cells(line).map((cell) => el(tag, {}, ...inline(cell))));
  const build = () =>
    el("div", { class: "table" }, el("table", {},
      el("thead", {}, row(lines[at], "th")),
      el("tbody", {}, ...lines.slice(at + 2, end).map((line) => row(line, "td")))));
  return [end, build];
}
