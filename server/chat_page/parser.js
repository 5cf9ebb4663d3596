// Markdown -> tokens, by markdown-it with tables, strikethrough and bare URLs. HTML is plain text. Added are formulas,
// footnotes, line breaks written as <br>, and definitions of links, which stay in sight: no word may be lost.

import MarkdownIt from "./vendor/markdown-it.js";

const MAX_FORMULA = 4000; // characters; keeps the search for an end linear
const ADDRESS = /^(?:https?:\/\/|mailto:)/i;
const BREAK = /<br ?\/?>/iy;
const FOOTNOTE = /^\[\^([^\]\s]{1,40})\]:[ \t]*/;
const FOOTNOTE_MARK = /\[\^([^\]\s]{1,40})\](?!:)/y;
const DELIMITERS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false]];

export const parser = new MarkdownIt({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
/** Links lead to other sites alone, and run nothing. */
parser.validateLink = (address) => ADDRESS.test(address.trim());

/** Where a mark is next; looked for once, however often one asks before it. */
function next(state, mark, from) {
  state.nextMarks ??= {};
  const known = state.nextMarks[mark];
  if (known && known.from <= from && (known.at < 0 || known.at >= from)) return known.at;
  const at = state.src.indexOf(mark, from);
  state.nextMarks[mark] = { from, at };
  return at;
}

/** The formula that begins at the present place. @returns {{tex: string, end: number, isDisplay: boolean}|null} */
function readFormula(state) {
  const { src, pos } = state;
  for (const [open, close, isDisplay] of DELIMITERS) {
    if (!src.startsWith(open, pos)) continue;
    const end = next(state, close, pos + open.length);
    if (end < 0 || end > pos + MAX_FORMULA) return null;
    const tex = src.slice(pos + open.length, end);
    return tex.trim() ? { tex, end: end + close.length, isDisplay } : null;
  }
  return src[pos] === "$" ? readDollars(src, pos) : null;
}

/** Between single dollars there is a formula if none of them can be money: "$5 and $10" is none. */
function readDollars(text, from) {
  if (/[\s$\d\p{L}]/u.test(text[from - 1] ?? " ") && !/\s/.test(text[from - 1] ?? " ")) return null;
  if (/[\s$]/.test(text[from + 1] ?? " ")) return null;
  const rest = text.slice(from + 1, from + MAX_FORMULA);
  for (const found of rest.matchAll(/\\.|\$|\n/gs)) {
    if (found[0] === "\n") return null;
    if (found[0] !== "$") continue;
    const isEnd = !/\s/.test(rest[found.index - 1]) && !/\d/.test(rest[found.index + 1] ?? "");
    return isEnd ? { tex: rest.slice(0, found.index), end: from + found.index + 2, isDisplay: false } : null;
  }
  return null;
}

parser.inline.ruler.before("escape", "formula", (state, isSilent) => {
  const char = state.src[state.pos];
  if (char !== "$" && char !== "\\") return false;
  const found = readFormula(state);
  if (!found || found.end > state.posMax) return false;
  if (!isSilent) Object.assign(state.push("formula", "", 0), { content: found.tex, meta: { isDisplay: found.isDisplay } });
  state.pos = found.end;
  return true;
});

parser.inline.ruler.before("autolink", "break", (state, isSilent) => {
  if (state.src[state.pos] !== "<") return false;
  BREAK.lastIndex = state.pos;
  const found = BREAK.exec(state.src);
  if (!found) return false;
  if (!isSilent) state.push("hardbreak", "br", 0);
  state.pos += found[0].length;
  return true;
});

parser.inline.ruler.before("link", "footnote_mark", (state, isSilent) => {
  if (state.src[state.pos] !== "[") return false;
  FOOTNOTE_MARK.lastIndex = state.pos;
  const found = FOOTNOTE_MARK.exec(state.src);
  if (!found) return false;
  if (!isSilent) state.push("footnote_mark", "sup", 0).content = found[1];
  state.pos += found[0].length;
  return true;
});

const ALT = { alt: ["paragraph", "reference", "blockquote", "list"] };

/** The text of a line, without its indentation; "" if it is indented as code is. */
function lineAt(state, line) {
  if (state.sCount[line] - state.blkIndent >= 4) return "";
  return state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
}

/** A formula on lines of its own, in which nothing else is Markdown. */
parser.block.ruler.before("fence", "formula_block", (state, from, to, isSilent) => {
  const first = lineAt(state, from);
  const [open, close] = DELIMITERS.find(([mark, , isDisplay]) => isDisplay && first.startsWith(mark)) ?? [];
  if (!open) return false;
  const begin = state.bMarks[from] + state.tShift[from] + open.length;
  const end = next(state, close, begin);
  if (end < 0 || end > begin + MAX_FORMULA) return false;
  let line = from;
  while (line < to && state.eMarks[line] < end) {
    line++;
    if (line >= to || state.isEmpty(line) || state.sCount[line] < state.blkIndent) return false;
  }
  if (state.src.slice(end + close.length, state.eMarks[line]).trim()) return false;
  const tex = state.getLines(from, line + 1, state.blkIndent, false).trim().slice(open.length, -close.length);
  if (!tex.trim()) return false;
  if (isSilent) return true;
  Object.assign(state.push("formula", "", 0), { content: tex, block: true, map: [from, line + 1], meta: { isDisplay: true } });
  state.line = line + 1;
  return true;
}, ALT);

/** A footnote stays where it is. */
parser.block.ruler.before("reference", "footnote", (state, from, to, isSilent) => {
  const found = FOOTNOTE.exec(lineAt(state, from));
  if (!found) return false;
  if (isSilent) return true;
  let end = from + 1;
  while (end < to && !state.isEmpty(end) && !FOOTNOTE.test(lineAt(state, end))) end++;
  const text = state.getLines(from, end, state.blkIndent, false).trim();
  Object.assign(state.push("footnote_open", "p", 1), { block: true, map: [from, end], content: found[1] });
  Object.assign(state.push("inline", "", 0), { content: text.slice(found[0].length), map: [from, end], children: [] });
  state.push("footnote_close", "p", -1);
  state.line = end;
  return true;
}, ALT);

const [{ fn: readReference }] = parser.block.ruler.__rules__.filter(({ name }) => name === "reference");

/** The definition of a link stays in sight. */
parser.block.ruler.at("reference", (state, from, to, isSilent) => {
  if (!readReference(state, from, to, isSilent)) return false;
  if (isSilent) return true;
  const content = state.getLines(from, state.line, state.blkIndent, false).trim();
  Object.assign(state.push("definition", "p", 0), { block: true, map: [from, state.line], content });
  return true;
});

/** The cells of a row that has more than the table has columns; markdown-it leaves them out. */
function surplus(line, numColumns) {
  const text = line.replace(/^[\s>]*/, "").trimEnd();
  const cells = text.replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  return cells.slice(numColumns).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

parser.core.ruler.before("inline", "surplus_cells", (state) => {
  if (!state.tokens.some(({ type }) => type === "tbody_open")) return;
  const lines = state.src.split("\n");
  const tokens = [];
  let [row, numCells, numColumns] = [null, 0, 0];
  for (const token of state.tokens) {
    if (token.type === "tr_open") [row, numCells] = [token, 0];
    if (token.type === "th_open") numColumns = ++numCells;
    if (token.type === "tr_close" && row.map && row.map[0] < lines.length && numColumns && tokens.at(-1).type === "td_close") {
      for (const content of surplus(lines[row.map[0]], numColumns)) {
        const [open, text, close] = [["td_open", 1], ["inline", 0], ["td_close", -1]].map(([type, nesting]) => new state.Token(type, "td", nesting));
        Object.assign(text, { content, children: [], level: token.level + 2 });
        tokens.push(Object.assign(open, { level: token.level + 1 }), text, Object.assign(close, { level: token.level + 1 }));
      }
    }
    tokens.push(token);
  }
  state.tokens = tokens;
});
