// The list of conversations: open, rename, export, delete.

import { byId, el, iconButton } from "./dom.js";
import { deleteConversation, readConversations, writeConversation } from "./store.js";

/**
 * Show the list.
 * @param {string} currentId
 * @param {{onOpen: (conversation: object) => void, onGone: (id: string) => void, onRename: (conversation: object) => void}} actions
 */
export function showConversations(currentId, actions) {
  if (byId("conversations").querySelector("input")) return; // a title is being edited; the list is updated after that
  const refresh = () => showConversations(currentId, actions);
  byId("conversations").replaceChildren(
    ...readConversations().map((conversation) => {
      const isCurrent = conversation.id === currentId;
      const onclick = () => actions.onOpen(conversation);
      const open = el("button", { type: "button", class: "open", "aria-current": isCurrent ? "true" : null, onclick }, conversation.title);
      const named = (what) => `${what} ${conversation.title}`;
      const remove = () => {
        if (!confirm(`Delete "${conversation.title}"?`)) return;
        deleteConversation(conversation.id);
        actions.onGone(conversation.id);
      };
      return el("li", { class: isCurrent ? "current" : null }, open,
        el("span", { class: "actions" },
          iconButton("edit", named("Rename"), () => rename(conversation, open, actions, refresh)),
          iconButton("save", named("Export"), () => save(conversation)),
          iconButton("trash", named("Delete"), remove)));
    }),
  );
}

function rename(conversation, open, actions, refresh) {
  const input = el("input", { "aria-label": "Title", value: conversation.title, maxlength: "80" });
  const finish = (isKept) => {
    input.onblur = null;
    const title = input.value.trim();
    if (isKept && title && title !== conversation.title) {
      writeConversation(Object.assign(conversation, { title, titled: Date.now() }));
      actions.onRename(conversation);
    }
    input.replaceWith(open);
    refresh();
  };
  input.onblur = () => finish(true);
  input.onkeydown = (event) => {
    event.stopPropagation();
    if (event.key === "Enter" || event.key === "Escape") finish(event.key === "Enter");
  };
  open.replaceWith(input);
  input.select();
}

function save(conversation) {
  const file = new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" });
  const href = URL.createObjectURL(file);
  const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
  el("a", { href, download: `${name || "chat"}.json` }).click();
  URL.revokeObjectURL(href);
}
