// Formulas, as MathML that KaTeX makes of TeX: browsers draw it without fonts or styles of the page. KaTeX is loaded with
// the first formula; until then, and for what it does not know, the TeX is shown.

import { el } from "./dom.js";

const OPTIONS = { output: "mathml", throwOnError: true, strict: "ignore", trust: false, maxExpand: 500, maxSize: 20 };

let loading = null;

/** @returns {Promise<object>} KaTeX, which knows no modules */
const load = () => (loading ??= import("./vendor/katex.js").then(() => window.katex));

/**
 * @param {string} tex
 * @param {boolean} isDisplay whether it stands on lines of its own
 * @returns {HTMLElement}
 */
export function formula(tex, isDisplay) {
  const element = el("span", { class: isDisplay ? "math display" : "math" }, tex);
  const show = (katex) => {
    try {
      const drawn = el("span");
      katex.render(tex, drawn, { ...OPTIONS, displayMode: isDisplay });
      element.replaceChildren(...drawn.childNodes);
    } catch {
      element.replaceChildren(el("code", {}, isDisplay ? `$$${tex}$$` : `$${tex}$`));
    }
  };
  if (window.katex) show(window.katex);
  else load().then(show, () => {});
  return element;
}
