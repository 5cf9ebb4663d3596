// Files that are attached and not sent yet, so that a reload finds them again. Each tab has its own.

import { newName } from "./conversation.js";
import { transact } from "./db.js";
import { tab } from "./local.js";

const KEPT_MS = 7 * 24 * 60 * 60_000; // those of tabs that were closed

/** Keep these files instead of those before. Where there is no room, they stay until the page is closed. */
export function keepFiles(files) {
  if (!tab.read()) tab.write(newName());
  const draft = { id: tab.read(), files, time: Date.now() };
  transact("readwrite", (handle) => (files.length ? handle.putDraft(draft) : handle.removeDraft(draft.id))).catch(() => {});
}

/** @returns {Promise<object[]>} what this tab has kept */
export async function keptFiles() {
  const drafts = await transact("readonly", (handle) => handle.allDrafts());
  const old = drafts.filter(({ time }) => time < Date.now() - KEPT_MS);
  if (old.length) await transact("readwrite", (handle) => Promise.all(old.map(({ id }) => handle.removeDraft(id)))).catch(() => {});
  return drafts.find(({ id }) => id === tab.read())?.files ?? [];
}
