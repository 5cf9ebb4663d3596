// Markdown -> DOM nodes. Only the elements below are made; strings become text, or the address of a checked link. A text
// that grows at its end, as a stream does, is read again from its last blocks on, so the work is linear in the answer.

import { codeBlock } from "./code.js";
import { el } from "./dom.js";
import { formula } from "./math.js";
import { parser } from "./parser.js";

const INLINE = { em: "em", strong: "strong", s: "del" };
const BLOCKS = { paragraph: "p", blockquote: "blockquote", bullet_list: "ul", ordered_list: "ol", list_item: "li", thead: "thead", tbody: "tbody", tr: "tr", th: "th", td: "td" };
const HAS_TEXT = new Set(["paragraph_close", "heading_close", "footnote_close", "list_item_close", "th_close", "td_close"]);
const TASK = /^\[([ xX])\](?=\s|$)/;

/**
 * Show text in an element. Blocks before the last two keep their nodes, so that a stream does not disturb them.
 * @param {HTMLElement & {shown?: {text: string, offset: number, count: number, env: object}}} element
 * @param {string} text
 * @param {boolean} isLive whether it may still grow
 */
export function showMarkdown(element, text, isLive = false) {
  const whole = text.replace(/\r\n?/g, "\n");
  const { shown } = element;
  if (shown && shown.text === whole && shown.isLive === isLive) return;
  const isMore = shown && whole.startsWith(shown.text) && (isLive || !shown.hasReferences);
  const state = isMore ? shown : { offset: 0, count: 0, env: { references: {} } };
  const numKnown = Object.keys(state.env.references).length;
  const tail = whole.slice(state.offset);
  const blocks = topBlocks(parser.parse(tail, state.env));
  while (element.childNodes.length > state.count) element.lastChild.remove();
  const last = blocks.at(-1);
  const numBefore = Math.max(0, blocks.length - 2); // the last line may still come to belong to the block before its own
  for (const block of blocks) element.append(build(block.tokens, isLive && block === last));
  rank(element);
  element.shown = {
    text: whole,
    isLive,
    env: state.env,
    // what stood before a definition may refer to it: seen once the text is complete
    hasReferences: state.hasReferences || (isLive && Object.keys(state.env.references).length > numKnown),
    offset: state.offset + (last ? startOfLine(tail, blocks[numBefore].line) : 0),
    count: state.count + numBefore,
  };
}

/** Let no heading be more than one level below the one before it, for those who move by headings; it looks as written. */
function rank(element) {
  let level = 2; // of the page's own
  for (const heading of element.querySelectorAll("h3, h4, h5, h6")) {
    const written = Number(heading.localName[1]);
    level = Math.min(written, level + 1);
    if (level < written) heading.setAttribute("aria-level", level);
  }
}

/** @returns {{line: number, tokens: object[]}[]} the tokens of each block that is in no other */
function topBlocks(tokens) {
  const blocks = [];
  for (const token of tokens) {
    if (token.level === 0 && token.nesting >= 0) blocks.push({ line: token.map[0], tokens: [] });
    blocks.at(-1).tokens.push(token);
  }
  return blocks;
}

function startOfLine(text, line) {
  let at = 0;
  for (let count = 0; count < line; count++) at = text.indexOf("\n", at) + 1;
  return at;
}

// --- blocks --------------------------------------------------------------------------------------------------------

/** @returns {DocumentFragment} */
function build(tokens, isOpen) {
  const root = document.createDocumentFragment();
  const open = [root];
  tokens.forEach((token, index) => {
    const parent = open.at(-1);
    if (token.hidden) return void (token.nesting === 1 ? open.push(parent) : open.pop()); // the paragraph of a tight list
    if (token.nesting === 1) {
      const element = opened(token, tokens, index);
      parent.append(element);
      return void open.push(element.inner ?? element);
    }
    if (token.nesting === -1) return void directed(open.pop(), token);
    parent.append(leaf(token, isOpen && index === tokens.length - 1));
  });
  return root;
}

/** Let a complete element follow the direction of its text; before, the browser would look again for every node. */
function directed(element, token) {
  if (HAS_TEXT.has(token.type)) element.dir = "auto";
}

function opened(token, tokens, index) {
  const kind = token.type.slice(0, -"_open".length);
  if (kind === "heading") return el(`h${Math.min(Number(token.tag[1]) + 2, 6)}`);
  if (kind === "table") {
    const table = el("table");
    return Object.assign(el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, table), { inner: table });
  }
  if (kind === "footnote") return el("p", { class: "footnote" }, el("sup", {}, token.content), " ");
  const align = /center|right/.exec(token.attrGet("style") ?? "")?.[0];
  const element = el(BLOCKS[kind], { class: align ?? null });
  if (kind === "ordered_list") number(element, tokens, index);
  if (kind === "list_item") {
    const text = tokens[index + 2];
    if (text?.type === "inline") text.task = TASK.exec(text.content);
    if (text?.task) element.classList.add("task");
    if (token.value !== undefined) element.setAttribute("value", token.value);
  }
  return element;
}

/** Keep the numbers of the source. */
function number(list, tokens, index) {
  const { level } = tokens[index];
  const items = [];
  for (let at = index + 1; tokens[at].level > level; at++) {
    if (tokens[at].type === "list_item_open" && tokens[at].level === level + 1) items.push(tokens[at]);
  }
  const numbers = items.map(({ info }) => Number(info));
  if (numbers[0] !== 1) list.setAttribute("start", numbers[0]);
  items.forEach((item, at) => {
    if (at && numbers[at] !== numbers[at - 1] + 1) item.value = numbers[at];
  });
  const numDigits = `${numbers.reduce((a, b) => Math.max(a, b), 0)}`.length;
  if (numDigits > 2) list.style.setProperty("padding-left", `${numDigits + 2}ch`);
}

function leaf(token, isOpen) {
  if (token.type === "inline") return inline(token);
  if (token.type === "fence" || token.type === "code_block") return codeBlock(token.content.replace(/\n$/, ""), token.info.trim(), isOpen);
  if (token.type === "formula") return formula(token.content, true);
  if (token.type === "definition") return el("p", { class: "definition", dir: "auto" }, ...definition(token.content));
  return token.type === "hr" ? el("hr") : document.createTextNode(token.content);
}

/** A definition as it is written, with its address as a link. */
function definition(text) {
  const address = /https?:\/\/[^\s<>]+/.exec(text);
  if (!address) return [text];
  const end = address.index + address[0].length;
  return [text.slice(0, address.index), link(address[0], "", [address[0]]), text.slice(end)];
}

// --- inside of a paragraph -----------------------------------------------------------------------------------------

function inline({ children, task }) {
  const root = document.createDocumentFragment();
  const open = [root];
  for (const token of children) {
    const parent = open.at(-1);
    if (token.nesting === 1) open.push(token.type === "link_open" ? { token, nodes: [] } : el(INLINE[token.tag] ?? "span"));
    else if (token.nesting === -1) put(open.at(-2), closed(open.pop()));
    else put(parent, text(token));
  }
  if (task) {
    root.firstChild.data = root.firstChild.data.slice(task[0].length);
    root.prepend(el("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": task[1] === " " ? "To do" : "Done" }));
  }
  return root;
}

/** Add to an element, or to a link that is not complete. */
const put = (parent, node) => (parent.nodes ? parent.nodes.push(node) : parent.append(node));

/** A link without words shows its address. */
function closed(element) {
  if (!element.token) return element;
  const href = element.token.attrGet("href");
  const isEmpty = !element.nodes.some((node) => node.textContent ?? node);
  return link(href, element.token.attrGet("title"), isEmpty ? [href] : element.nodes);
}

function text(token) {
  if (token.type === "code_inline") return el("code", {}, token.content);
  if (token.type === "softbreak" || token.type === "hardbreak") return el("br");
  if (token.type === "formula") return formula(token.content, token.meta.isDisplay);
  if (token.type === "footnote_mark") return el("sup", {}, token.content);
  if (token.type === "image") return image(token);
  return document.createTextNode(token.content);
}

/** Images become links, since loading one would tell another host about the reader. */
function image(token) {
  const href = token.attrGet("src");
  return link(href, token.attrGet("title"), [plain(token.children) || href]);
}

const plain = (tokens) => tokens.map((token) => (token.type === "softbreak" ? " " : token.children ? plain(token.children) : token.content)).join("");

function link(href, title, children) {
  if (!parser.validateLink(href)) return el("span", {}, children);
  return el("a", { href, title: title || null, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}
