// Code blocks with language and copy button. highlight.js colours them; it is loaded with the first block that has a
// language. Its tree becomes nodes here, since it would make HTML of it.

import { copy, el, iconButton } from "./dom.js";

const MAX_COLOURED = 50_000; // characters
const KINDS = {
  comment: "comment", quote: "comment", string: "text", regexp: "text", symbol: "text", addition: "text", number: "number",
  literal: "number", deletion: "number", keyword: "word", built_in: "word", type: "word", name: "word", tag: "word", meta: "comment",
  title: "name", attr: "name", attribute: "name", section: "name", variable: "number", property: "name",
};

let loading = null;
let highlighter = null;

const load = () => (loading ??= import("./vendor/highlight.js").then((module) => (highlighter = module.default)));

/**
 * @param {string} code
 * @param {string} info the text after the fence, the language first; may be empty
 * @param {boolean} isOpen whether it may still grow; then it is not coloured yet
 * @returns {HTMLElement}
 */
export function codeBlock(code, info, isOpen = false) {
  const [language] = info.split(/\s/);
  const button = iconButton("copy", "Copy code", () => copy(code, button));
  const head = el("div", { class: "code-head" }, el("span", {}, info || "text"), button);
  const content = el("code", {}, code);
  if (language && !isOpen && code.length < MAX_COLOURED) colour(content, code, language.toLowerCase());
  return el("div", { class: "code-block", dir: "ltr" }, head, el("pre", { tabindex: "0" }, content));
}

function colour(element, code, language) {
  const show = () => {
    if (!highlighter.getLanguage(language)) return;
    const { _emitter: tree } = highlighter.highlight(code, { language, ignoreIllegals: true });
    element.replaceChildren(...nodes(tree.rootNode ?? tree.root));
  };
  if (highlighter) show();
  else load().then(show, () => {});
}

function nodes({ children }) {
  return children.map((child) => {
    if (typeof child === "string") return child;
    const kind = KINDS[child.scope?.split(".")[0]];
    return el("span", { class: kind ? `code-${kind}` : null }, ...nodes(child));
  });
}
