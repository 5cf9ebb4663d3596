// Builds DOM nodes. Strings only become text nodes or attribute values, never HTML.

const ICONS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h16",
  sliders: "M4 8h9M19 8h1M4 16h1M11 16h9M16 5.500v5M8 13.500v5",
  theme: "M12 3a9 9 0 1 0 9 9 7 7 0 0 1-9-9z",
  down: "M12 5v14M6 13l6 6 6-6",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12l5 5 9-10",
  redo: "M20 11a8 8 0 1 0-2.300 6.300M20 5v6h-6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM16 16l5 5",
  close: "M7 7l10 10M17 7L7 17",
  columns: "M4 5h16v14H4zM12 5v14",
  load: "M12 15V4M7 9l5-5 5 5M5 20h14",
  clip: "M8 12l6-6a3 3 0 0 1 4 4l-8 8a5 5 0 0 1-7-7l7-7",
  picture: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.500 9h.01",
  mic: "M12 3a3 3 0 0 0-3 3v5a3 3 0 0 0 6 0V6a3 3 0 0 0-3-3zM6 11a6 6 0 0 0 12 0M12 17v4",
  chart: "M5 20V11M12 20V4M19 20v-6",
};

/**
 * Make an element.
 * @param {string} tag
 * @param {Object<string, any>} attributes "on..." adds a listener, true an empty attribute; false and null add none
 * @param {...(Node|string|null|Array)} children or lists of them; a list may exceed the limit on arguments of a call
 * @returns {HTMLElement}
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child != null) element.append(child);
  return element;
}

/** @param {string} id */
export const byId = (id) => document.getElementById(id);

/** An icon, hidden from assistive technology: its button has the name. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button with an icon; `label` is its accessible name and tooltip. */
export function iconButton(name, label, onclick) {
  return el("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick }, icon(name));
}

/** Copy text, and confirm it on the button. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // there is no clipboard without permission, or over plain HTTP from another host
    const area = el("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.replaceChildren(icon("check"));
  setTimeout(() => button.replaceChildren(icon("copy")), 1200);
}
