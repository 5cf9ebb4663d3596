// The list of conversations: open, rename, export, delete; and the search over all of them.

import { byId, el, iconButton } from "./dom.js";
import { deleteConversation, listConversations, readConversation, searchConversations, unsaved, writeConversation } from "./store.js";
import { saveJson, saveMarkdown } from "./transfer.js";

const SEARCH_MS = 150;

export class ConversationsView {
  /**
   * @param {object} actions
   * @param {() => string} actions.currentId
   * @param {(id: string) => string} actions.stateOf "" or in words what its answer does
   * @param {(id: string) => void} actions.onOpen
   * @param {(id: string) => void} actions.onGone
   * @param {() => void} actions.onRename
   */
  constructor(actions) {
    Object.assign(this, { actions, found: null, turn: 0 });
    byId("search").addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.show(), SEARCH_MS);
    });
    byId("search").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !event.target.value) return;
      event.stopPropagation();
      event.target.value = "";
      this.show();
    });
  }

  /** Show the list, or what is found. A title that is being edited stays; the list is updated after that. */
  async show() {
    const turn = ++this.turn;
    const text = byId("search").value.trim();
    const [all, found] = await Promise.all([listConversations(), text ? searchConversations(text) : null]);
    if (turn !== this.turn || byId("conversations").querySelector("input")) return;
    const shown = found ? all.filter(({ id }) => found.has(id)) : all;
    const look = JSON.stringify([shown.map((meta) => [meta.id, meta.title, this.actions.stateOf(meta.id)]), this.actions.currentId(), [...unsaved], text]);
    byId("search-row").hidden = all.length < 2 && !text;
    byId("none-found").hidden = shown.length > 0 || !text;
    if (look === this.look) return;
    this.look = look;
    byId("conversations").replaceChildren(...shown.map((meta) => this.item(meta, found?.get(meta.id))));
  }

  item({ id, title }, place) {
    const isCurrent = id === this.actions.currentId();
    const state = unsaved.has(id) ? "not saved" : this.actions.stateOf(id);
    const mark = state && el("span", { class: `state ${state.replace(" ", "-")}`, title: state }, el("span", { class: "visually-hidden" }, state));
    const open = el("button", { type: "button", class: "open", "aria-current": isCurrent ? "true" : null, onclick: () => this.actions.onOpen(id) },
      el("span", { class: "name", dir: "auto" }, title), mark || null, place ? el("span", { class: "place" }, place) : null);
    const remove = async () => {
      if (!confirm(`Delete "${title}"?`)) return;
      await deleteConversation(id);
      this.actions.onGone(id);
    };
    const item = el("li", { class: isCurrent ? "current" : null }, open,
      el("span", { class: "actions" },
        iconButton("edit", `Rename ${title}`, () => this.rename(id, title, open)),
        iconButton("save", `Export ${title}`, (event) => this.offer(id, title, event.currentTarget)),
        iconButton("trash", `Delete ${title}`, remove)));
    return item;
  }

  /** Ask for the format of an export, in the place of the row's buttons. */
  offer(id, title, button) {
    const save = (write) => async () => {
      write(await readConversation(id));
      this.refresh();
    };
    const choice = (name, write) => el("button", { type: "button", class: "small", "aria-label": `Export ${title} as ${name}`, onclick: save(write) }, name);
    const first = choice("JSON", saveJson);
    button.parentElement.replaceChildren(first, choice("Markdown", saveMarkdown));
    first.focus();
  }

  refresh() {
    this.look = "";
    this.show();
  }

  rename(id, before, open) {
    const input = el("input", { "aria-label": "Title", value: before, maxlength: "80" });
    const finish = async (isKept) => {
      input.onblur = null;
      const title = input.value.trim();
      input.replaceWith(open);
      if (isKept && title && title !== before) {
        const conversation = await readConversation(id);
        await writeConversation(Object.assign(conversation, { title, titled: Date.now() }));
        this.actions.onRename();
      }
      this.refresh();
    };
    input.onblur = () => finish(true);
    input.onkeydown = (event) => {
      event.stopPropagation();
      if (event.key === "Enter" || event.key === "Escape") finish(event.key === "Enter");
    };
    open.replaceWith(input);
    input.select();
  }
}
