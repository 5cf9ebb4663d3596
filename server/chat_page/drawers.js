// The columns at the sides. Where there is room they stand beside the page, else they slide over it; the left one can be
// folded away.

import { byId } from "./dom.js";
import { folded } from "./local.js";

const DRAWERS = { sidebar: matchMedia("(max-width: 760px)"), panel: matchMedia("(max-width: 1120px)") };

/** A drawer that is not shown cannot be focused. */
function show() {
  const { drawer: open, folded: isFolded } = document.body.dataset;
  for (const [name, isNarrow] of Object.entries(DRAWERS)) {
    const isShown = open === name || (!isNarrow.matches && !(name === "sidebar" && isFolded));
    byId(name).inert = !isShown;
    byId(`open-${name}`).setAttribute("aria-expanded", isShown);
  }
}

export function openDrawer(name) {
  byId(name).scrollTop = 0;
  if (name === "sidebar" && !DRAWERS.sidebar.matches) return void fold(false);
  if (!DRAWERS[name].matches || document.body.dataset.drawer === name) return;
  document.body.dataset.drawer = name;
  show();
  byId(name).querySelector("button, summary").focus();
}

export function closeDrawer() {
  const name = document.body.dataset.drawer;
  if (!name) return;
  delete document.body.dataset.drawer;
  show();
  byId(`open-${name}`).focus();
}

function fold(isFolded) {
  if (isFolded) document.body.dataset.folded = "true";
  else delete document.body.dataset.folded;
  folded.write(isFolded ? "true" : "");
  show();
}

/** Show the conversations, or fold them away. */
export function toggleSidebar() {
  if (!DRAWERS.sidebar.matches) fold(!document.body.dataset.folded);
  else if (document.body.dataset.drawer === "sidebar") closeDrawer();
  else openDrawer("sidebar");
}

export function bindDrawers() {
  byId("open-sidebar").addEventListener("click", toggleSidebar);
  byId("fold-sidebar").addEventListener("click", () => {
    toggleSidebar();
    byId("open-sidebar").focus();
  });
  for (const id of ["open-panel", "engine-pill"]) byId(id).addEventListener("click", () => openDrawer("panel"));
  document.addEventListener("open-panel", () => openDrawer("panel"));
  byId("scrim").addEventListener("click", closeDrawer);
  for (const query of Object.values(DRAWERS)) query.addEventListener("change", show);
  fold(Boolean(folded.read()));
}
