// What is told above the composer: that storage is full, and what can be undone.

import { byId } from "./dom.js";
import { saveAllJson } from "./transfer.js";

const UNDO_MS = 10_000;
let timer = 0;
let undo = null;

export function bindNotices() {
  byId("full-export").addEventListener("click", saveAllJson);
  byId("undo").addEventListener("click", () => {
    byId("undoable").hidden = true;
    undo?.();
  });
}

export const warnUnsaved = (isUnsaved) => void (byId("full").hidden = !isUnsaved);

/** Say what was done, and offer for a while to undo it. */
export function tellUndoable(text, action) {
  undo = action;
  byId("undoable-text").textContent = text;
  byId("undoable").hidden = false;
  clearTimeout(timer);
  timer = setTimeout(() => (byId("undoable").hidden = true), UNDO_MS);
}
