// Connects the parts of the page: composer, keyboard, drawers, and the hooks between them.

import { readSamplingDefaults } from "./api.js";
import { Chat } from "./chat.js";
import { showConversations } from "./conversations_view.js";
import { byId, icon } from "./dom.js";
import { EngineView } from "./engine_view.js";
import { askForKey, bindSettings, bindTheme, change, showDefaults } from "./settings_view.js";
import { current, draft, isKept, key, newConversation, readConversations, watchOtherTabs } from "./store.js";

const input = byId("input");
let edited = null; // the message that is being edited, if any

const chat = new Chat({
  onChange: listConversations,
  onRun(isRunning) {
    const { activeElement: focused } = document;
    byId("stop").hidden = !isRunning;
    byId("send").hidden = isRunning;
    // Move the focus from a hidden button to the visible one; on a phone, do not open the keyboard.
    if (isRunning && focused === document.body) byId("stop").focus();
    else if (focused === byId("stop") && matchMedia("(hover: hover)").matches) input.focus();
  },
  onEdit(message) {
    edited = message;
    write(message.content);
  },
  onExample(example) {
    change(example.settings);
    write(example.prompt);
    submit();
  },
});

function listConversations() {
  showConversations(chat.conversation.id, {
    onOpen: openConversation,
    onGone: forgetConversation,
    onRename({ id, title, titled }) {
      if (id !== chat.conversation.id) return;
      Object.assign(chat.conversation, { title, titled });
      byId("title").textContent = title;
    },
  });
}

function forgetConversation(id) {
  if (id !== chat.conversation.id) return void listConversations();
  chat.conversation.isDeleted = true;
  openConversation(newConversation());
}

function openConversation(conversation) {
  closeDrawer();
  if (conversation.id !== chat.conversation.id) { // the open one may be growing, and its stored copy is older
    edited = null;
    chat.open(conversation);
    fit();
  }
  input.focus();
}

// --- the composer -------------------------------------------------------------------------------------------------

function fit() {
  byId("editing").hidden = !edited;
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  draft.write(edited ? "" : input.value);
}

function write(text) {
  input.value = text;
  fit();
  input.focus();
}

/** Send the text; keep it in the composer if a field of the panel is invalid. */
function submit() {
  const text = input.value;
  if (!text.trim() || chat.abort) return;
  const before = edited ? chat.messages.slice(0, chat.messages.findIndex(({ turn }) => turn === edited.turn)) : chat.messages;
  if (chat.attempt(() => chat.ask([...before, { role: "user", content: text, turn: edited?.turn }]))) {
    edited = null;
    write("");
  }
}

function cancelEdit() {
  edited = null;
  write("");
  chat.sync();
}

input.addEventListener("input", fit);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("stop").addEventListener("click", () => chat.stop());
byId("cancel-edit").addEventListener("click", cancelEdit);
byId("new-chat").addEventListener("click", () => openConversation(newConversation()));

// --- drawers ------------------------------------------------------------------------------------------------------

const DRAWERS = { sidebar: matchMedia("(max-width: 760px)"), panel: matchMedia("(max-width: 1120px)") };

/** Show a drawer beside the page if there is room, else over it; a hidden drawer cannot be focused. */
function showDrawers() {
  const open = document.body.dataset.drawer;
  for (const [name, isNarrow] of Object.entries(DRAWERS)) {
    const isShown = open === name || !isNarrow.matches;
    byId(name).inert = !isShown;
    byId(`open-${name}`).setAttribute("aria-expanded", isShown);
  }
}

function openDrawer(name) {
  byId(name).scrollTop = 0;
  if (!DRAWERS[name].matches || document.body.dataset.drawer === name) return;
  document.body.dataset.drawer = name;
  showDrawers();
  byId(name).querySelector("button, summary").focus();
}

function closeDrawer() {
  const name = document.body.dataset.drawer;
  if (!name) return;
  delete document.body.dataset.drawer;
  showDrawers();
  byId(`open-${name}`).focus();
}

byId("open-sidebar").addEventListener("click", () => openDrawer("sidebar"));
for (const id of ["open-panel", "engine-pill"]) byId(id).addEventListener("click", () => openDrawer("panel"));
document.addEventListener("open-panel", () => openDrawer("panel"));
byId("scrim").addEventListener("click", closeDrawer);
for (const query of Object.values(DRAWERS)) query.addEventListener("change", showDrawers);

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, textarea, select");
  if (event.key === "Escape" && !byId("key-dialog").open) {
    if (document.body.dataset.drawer) closeDrawer();
    else if (chat.abort) chat.stop();
    else if (edited) cancelEdit();
  } else if ((event.key === "/" && !isTyping) || (event.key === "k" && (event.ctrlKey || event.metaKey))) {
    event.preventDefault();
    closeDrawer();
    input.focus();
  }
});

// --- start --------------------------------------------------------------------------------------------------------

const engine = new EngineView(
  (stats) => {
    const isFirst = chat.stats?.model !== stats.model;
    chat.stats = stats;
    if (!isFirst) return;
    byId("version").textContent = stats.version;
    byId("model").textContent = stats.model;
    document.title = `${stats.model} · Weft`;
    byId("docs").hidden = Boolean(key.read()); // a link carries no key
    byId("chip-thinking").hidden = !stats.thinking;
    for (const chip of document.querySelectorAll("[data-section=tools]")) chip.hidden = !stats.has_tools;
    if (!chat.messages.length) chat.show();
    readSamplingDefaults().then(showDefaults, () => {});
  },
  async (error) => {
    if (!(await askForKey(error.message))) await new Promise((resolve) => document.addEventListener("key", resolve, { once: true }));
  },
);

for (const element of document.querySelectorAll("[data-icon]")) element.prepend(icon(element.dataset.icon));
bindSettings();
bindTheme();
byId("change-key").addEventListener("click", () => askForKey("The page sends it with every request."));
showDrawers();
if (!isKept) byId("kept").textContent = "This browser blocks storage: conversations are lost when the page is closed.";
chat.open(readConversations().find(({ id }) => id === current.read()) ?? newConversation());
write(draft.read());
engine.run();
addEventListener("pagehide", () => chat.leave());
watchOtherTabs((id, isDeleted) => {
  if (isDeleted) return void forgetConversation(id);
  if (id === chat.conversation.id && !edited) chat.sync();
  listConversations();
});
