// Conversations as files: one or all, as JSON with all that belongs to them, or as Markdown. Both can be read again.

import { el } from "./dom.js";
import { readMarkdown, writeMarkdown } from "./markdown_file.js";
import { fromPlain, listConversations, readConversation, writeConversation } from "./store.js";

const MAX_NAME = 40;

/** The conversation and its messages, as a file holds them. */
const plain = (conversation) => ({ ...conversation.meta, nodes: [...conversation.nodes.values()] });

function download(name, type, text) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000); // the browser may still be reading
}

const nameOf = ({ title }) => title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, MAX_NAME) || "chat";

export const saveJson = (conversation) =>
  download(`${nameOf(conversation)}.json`, "application/json", JSON.stringify(plain(conversation), null, 2));

export const saveMarkdown = (conversation) => download(`${nameOf(conversation)}.md`, "text/markdown", writeMarkdown(conversation));

async function readAll() {
  const metas = await listConversations();
  return Promise.all(metas.map(({ id }) => readConversation(id)));
}

export const saveAllJson = async () =>
  download("weft-chats.json", "application/json", JSON.stringify({ chats: (await readAll()).filter(Boolean).map(plain) }));

export const saveAllMarkdown = async () =>
  download("weft-chats.md", "text/markdown", (await readAll()).filter(Boolean).map(writeMarkdown).join("\n"));

/**
 * Store the conversations of a file; one that is there already gets what it lacks.
 * @param {File} file
 * @returns {Promise<string>} what came of it, in words
 */
export async function load(file) {
  let given;
  try {
    const text = await file.text();
    given = /\.(md|markdown)$/i.test(file.name) ? readMarkdown(text) : JSON.parse(text);
  } catch {
    return `${file.name} is not JSON: only JSON and Markdown (.md) that were exported here can be imported.`;
  }
  const found = [given?.chats ?? given].flat().map(fromPlain).filter(Boolean);
  if (!found.length) return `${file.name} holds no conversation.`;
  for (const conversation of found) {
    if (await writeConversation(conversation)) continue;
    return "The browser's storage is full: not everything in the file is kept.";
  }
  return found.length === 1 ? `"${found[0].title}" is imported.` : `${found.length} conversations are imported.`;
}
