// Shows tokens shaded by their probability, with alternatives on hover and focus. One token is in the tab order; the
// arrow keys move between tokens.

import { byId, el } from "./dom.js";

const percent = (logprob) => {
  const value = Math.exp(logprob) * 100;
  return value >= 99.95 ? "100 %" : `${value.toFixed(value < 10 ? 2 : 1)} %`;
};

/** A token with visible white space. */
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

/**
 * Show tokens in an element; the ones already shown stay.
 * @param {HTMLElement} element
 * @param {import("./conversation.js").Message["tokens"]} tokens
 */
export function showTokens(element, tokens) {
  for (const token of tokens.slice(element.childNodes.length)) {
    const span = el("span", { class: "token", tabindex: element.firstChild ? "-1" : "0" }, token[3]);
    span.style.setProperty("--doubt", (1 - Math.exp(token[1])).toFixed(3));
    span.token = token;
    element.append(span);
  }
}

/** Show alternatives of an element's tokens on hover and focus. */
export function watchTokens(element) {
  element.addEventListener("mouseover", (event) => show(event.target));
  element.addEventListener("focusin", (event) => show(event.target));
  element.addEventListener("mouseleave", hide);
  element.addEventListener("focusout", hide);
  element.addEventListener("keydown", (event) => {
    const step = { ArrowRight: "nextSibling", ArrowLeft: "previousSibling" }[event.key];
    const next = step && event.target[step];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

function show(span) {
  if (!span.token) return;
  const [text, logprob, others] = span.token;
  const rows = others.some(([other]) => other === text) ? others : [[text, logprob], ...others];
  const popup = byId("alternatives");
  popup.replaceChildren(
    ...rows.map(([other, value]) => {
      const bar = el("i");
      bar.style.setProperty("width", `${Math.exp(value) * 100}%`);
      const name = el("code", {}, visible(other));
      return el("div", { class: other === text ? "chosen" : null }, name, el("span", { class: "bar" }, bar), el("span", {}, percent(value)));
    }),
  );
  popup.hidden = false;
  const box = span.getBoundingClientRect();
  const [width, height] = [popup.offsetWidth, popup.offsetHeight];
  const isAbove = box.top > height + 16;
  popup.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
  popup.style.top = `${isAbove ? box.top - height - 6 : box.bottom + 6}px`;
  document.querySelector("[aria-describedby=alternatives]")?.removeAttribute("aria-describedby");
  span.setAttribute("aria-describedby", "alternatives");
}

function hide() {
  byId("alternatives").hidden = true;
}
