// Connects the parts of the page, and the keyboard.

import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { Context } from "./context.js";
import { ConversationsView } from "./conversations_view.js";
import { byId, icon } from "./dom.js";
import { bindDrawers, closeDrawer, toggleSidebar } from "./drawers.js";
import { EngineView } from "./engine_view.js";
import { keptFiles } from "./drafts.js";
import { current, draft, key } from "./local.js";
import { Microphone } from "./microphone.js";
import { chooseModel, showModels } from "./models.js";
import { bindNotices, tellUndoable, warnUnsaved } from "./notices.js";
import { askForKey, bindSettings, bindTheme, change, showDefaults, showServers, useSettings } from "./settings_view.js";
import { freshConversation, isKept, newConversation, readConversation, takeOver, unsaved, watchOtherTabs, writeSettings } from "./store.js";
import { load, saveAllJson, saveAllMarkdown } from "./transfer.js";

const chat = new Chat({
  onChange() {
    list.show();
    warnUnsaved(unsaved.size > 0);
    showRunning();
    context.refresh();
  },
  onOpen() {
    useSettings(chat.conversation.settings);
    chooseModel(chat.conversation.settings.model);
    showModel();
    engine.hurry();
    composer.reset();
  },
  onEdit: (message) => composer.edit(message),
  onExample(example) {
    change(example.settings);
    composer.write(example.prompt);
    composer.submit();
  },
  onUndoable: tellUndoable,
});
const composer = new Composer(chat, () => context.refresh());
const context = new Context(chat, composer);
const microphone = new Microphone((text) => composer.append(text));

const list = new ConversationsView({
  currentId: () => chat.conversation.id,
  stateOf(id) {
    if ([...chat.runs.running.values()].some(({ conversation }) => conversation.id === id)) return "answering";
    return chat.unseen.has(id) ? "new answer" : "";
  },
  onOpen: (id) => openConversation(id),
  onGone: forgetConversation,
  onRename: () => chat.show(),
});

function forgetConversation(id) {
  for (const { conversation, abort } of chat.runs.running.values()) if (conversation.id === id) abort.abort();
  if (id === chat.conversation.id) {
    chat.conversation.isDeleted = true;
    chat.open(newConversation());
  } else list.show();
}

async function openConversation(id) {
  closeDrawer();
  const opening = id === chat.conversation.id ? null : readConversation(id);
  composer.opening = opening;
  const conversation = await opening;
  if (composer.opening !== opening) return; // another was asked for since
  composer.opening = null;
  if (conversation) chat.open(conversation);
  composer.focus();
}

function newChat() {
  closeDrawer();
  composer.opening = null;
  chat.open(newConversation());
  composer.focus();
}

let wasRunning = false;

function showRunning() {
  const { isRunning } = chat;
  if (isRunning === wasRunning) return;
  wasRunning = isRunning;
  const { activeElement: focused } = document;
  const isStop = focused === byId("stop");
  byId("stop").hidden = !isRunning;
  byId("send").hidden = isRunning;
  // Move the focus from a hidden button to the visible one; on a phone, do not open the keyboard.
  if (isRunning && focused === document.body) byId("stop").focus();
  else if (isStop && matchMedia("(hover: hover)").matches) composer.focus();
}

/** Store the settings of the open conversation. */
function settle() {
  const { conversation } = chat;
  conversation.settled = Date.now();
  writeSettings(conversation);
  context.refresh();
  if (chat.model) showModel();
  else engine.hurry();
}

// --- keyboard -----------------------------------------------------------------------------------------------------

const SHORTCUTS = {
  k: () => {
    closeDrawer();
    composer.focus();
  },
  b: toggleSidebar,
  "shift+o": newChat,
};

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, textarea, select");
  const name = `${event.shiftKey ? "shift+" : ""}${event.key.toLowerCase()}`;
  const shortcut = event.ctrlKey || event.metaKey ? SHORTCUTS[name] : event.key === "/" && !isTyping ? SHORTCUTS.k : null;
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (document.body.dataset.drawer) closeDrawer();
    else if (microphone.isBusy) microphone.cancel();
    else if (chat.isRunning) chat.stop();
    else if (composer.edited) composer.cancelEdit();
  } else if (shortcut) {
    event.preventDefault();
    shortcut();
  }
});

byId("stop").addEventListener("click", () => chat.stop());
byId("new-chat").addEventListener("click", newChat);
byId("export-json").addEventListener("click", saveAllJson);
byId("export-markdown").addEventListener("click", saveAllMarkdown);
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async ({ target }) => {
  const files = [...target.files];
  target.value = ""; // so that the same file can be chosen once more
  for (const file of files) byId("moved").textContent = await load(file);
  chat.sync();
  list.show();
});

// --- start --------------------------------------------------------------------------------------------------------

let models = null;
let shownModel = "";

/** Show what the model of the open conversation can do, once that is known. */
async function showModel() {
  const { model } = chat;
  const look = `${model?.name} ${model?.input_modalities}`; // what it sees is known once it was loaded
  if (!model || look === shownModel) return;
  shownModel = look;
  composer.attachments.offer();
  byId("version").textContent = model.version;
  byId("model").textContent = model.name;
  document.title = `${model.name} · Weft`;
  byId("docs").hidden = Boolean(key.read()); // a link carries no key
  byId("chip-thinking").hidden = !model.thinking;
  context.refresh();
  for (const part of document.querySelectorAll("[data-section=tools], #section-tools")) part.hidden = !model.has_tools;
  showServers(model.mcp_servers);
  chat.show();
  models ??= showModels(chat);
  const { defaults, hearing } = await models;
  microphone.offer(hearing);
  showDefaults(defaults.get(model.name) ?? {});
}

const engine = new EngineView(
  () => chat.conversation.settings.model ?? "",
  (stats, asked) => {
    const { model: name, ...abilities } = stats;
    chat.known.set(asked, { name, ...abilities });
    if (asked === (chat.conversation.settings.model ?? "")) showModel();
  },
  async (error) => {
    if (!(await askForKey(error.message))) await new Promise((resolve) => document.addEventListener("key", resolve, { once: true }));
  },
);

async function start() {
  for (const element of document.querySelectorAll("[data-icon]")) element.prepend(icon(element.dataset.icon));
  bindNotices();
  bindSettings(settle);
  bindTheme();
  bindDrawers();
  byId("change-key").addEventListener("click", () => askForKey("The page sends it with every request."));
  await takeOver();
  if (!(await isKept())) byId("kept").textContent = "This browser blocks storage: conversations are lost when the page is closed.";
  const text = draft.read();
  chat.open((await readConversation(current.read())) ?? freshConversation());
  composer.write(byId("input").value || text);
  const files = await keptFiles();
  if (files.length && !composer.attachments.files.length) composer.attachments.set(files);
  engine.run();
}

addEventListener("pagehide", () => chat.runs.leave());
addEventListener("beforeunload", (event) => {
  if (unsaved.size) event.preventDefault();
});
watchOtherTabs((id, isDeleted) => {
  if (isDeleted) return void forgetConversation(id);
  if (id === chat.conversation.id) chat.sync();
  else list.show();
});
start();
