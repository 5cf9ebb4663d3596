// Binds the panel's fields and the composer's chips to the settings. Also the dialog for the API key.

import { byId, el } from "./dom.js";
import { SCHEMA, TOOLS } from "./examples.js";
import { Fault, SAMPLING, readSchema, toolsOf } from "./request.js";
import { defaults, key, presets, theme } from "./local.js";

const CHECKS = { tools: toolsOf, schema: ({ schema }) => readSchema(schema) };

let settings = {}; // of the open conversation
let onChange = () => {};

/**
 * Create the fields, and keep settings and page in sync.
 * @param {() => void} whenChanged
 */
export function bindSettings(whenChanged) {
  onChange = whenChanged;
  for (const { name, label, fallback, ...range } of SAMPLING) {
    const input = el("input", { type: "number", "data-setting": name, ...range, placeholder: fallback });
    byId("sampling").append(el("label", {}, label, input));
  }
  for (const field of document.querySelectorAll("[data-setting]")) {
    field.addEventListener("input", () => {
      const { setting } = field.dataset;
      settings[setting] = field.type !== "number" ? field.value : field.value === "" ? undefined : field.valueAsNumber;
      if (CHECKS[setting]) check(setting);
      onChange();
    });
  }
  for (const chip of document.querySelectorAll("[data-toggle]")) chip.addEventListener("click", () => toggle(chip));
  byId("background").addEventListener("change", ({ target }) => change({ background: target.checked }));
  byId("tools-example").addEventListener("click", () => change({ tools: JSON.stringify(TOOLS, null, 2), tools_on: true }));
  byId("schema-example").addEventListener("click", () => change({ schema: JSON.stringify(SCHEMA, null, 2), schema_on: true }));
  byId("make-default").addEventListener("click", () => tell(defaults.write(settings) ? "New chats begin with these settings." : "The browser's storage is full."));
  byId("forget-default").addEventListener("click", () => {
    defaults.forget();
    for (const { name } of SAMPLING) delete settings[name];
    change(defaults.read());
    tell("This chat and new ones have the model's settings.");
  });
  bindPresets();
}

const tell = (text) => void (byId("defaults-told").textContent = text);

/** Show the settings of another conversation. */
export function useSettings(others) {
  settings = others;
  byId("defaults-told").textContent = "";
  show();
}

/** Change settings, and show them. */
export function change(values) {
  Object.assign(settings, values);
  show();
  onChange();
}

function show() {
  for (const field of document.querySelectorAll("[data-setting]")) field.value = settings[field.dataset.setting] ?? "";
  for (const chip of document.querySelectorAll("[data-toggle]")) {
    chip.setAttribute("aria-pressed", Boolean(settings[chip.dataset.toggle]));
  }
  byId("background").checked = Boolean(settings.background);
  for (const box of byId("mcp-servers").querySelectorAll("input")) box.checked = settings.mcp_servers?.includes(box.value) ?? false;
  Object.keys(CHECKS).forEach(check);
}

/** Offer the MCP servers that the operator allows. */
export function showServers(labels) {
  const choose = () => change({ mcp_servers: [...byId("mcp-servers").querySelectorAll(":checked")].map((box) => box.value) });
  const box = (value) => el("label", { class: "check" }, el("input", { type: "checkbox", value, onchange: choose }), value);
  byId("mcp-servers").replaceChildren(...labels.map(box));
  byId("mcp").hidden = !labels.length;
  show();
}

function toggle(chip) {
  const name = chip.dataset.toggle;
  change({ [name]: !settings[name] });
  const { section } = chip.dataset;
  if (settings[name] && section && byId(`${section}-fault`).textContent) showSection(section);
}

/** Named system prompts: choose one, keep the present one under a name, forget one. */
function bindPresets() {
  const select = byId("presets");
  const name = byId("preset-name");
  const list = () => {
    select.replaceChildren(el("option", { value: "" }, "Presets"), ...presets.read().map((preset) => el("option", { value: preset.name }, preset.name)));
    byId("forget-preset").hidden = true;
  };
  select.addEventListener("change", () => {
    const chosen = presets.read().find((preset) => preset.name === select.value);
    byId("forget-preset").hidden = !chosen;
    if (chosen) change({ system: chosen.text });
    name.value = select.value;
  });
  byId("keep-preset").addEventListener("click", () => {
    const preset = { name: name.value.trim(), text: settings.system };
    if (!preset.name) return void name.focus();
    presets.write([...presets.read().filter((other) => other.name !== preset.name), preset]);
    list();
    select.value = preset.name;
    byId("forget-preset").hidden = false;
  });
  byId("forget-preset").addEventListener("click", () => {
    presets.write(presets.read().filter((preset) => preset.name !== select.value));
    name.value = "";
    list();
  });
  list();
}

/** Show the fault of a field while it is in use. */
function check(section) {
  const fault = byId(`${section}-fault`);
  fault.textContent = "";
  if (!settings[`${section}_on`]) return;
  try {
    CHECKS[section](settings);
  } catch (error) {
    if (!(error instanceof Fault)) throw error;
    fault.textContent = error.message;
  }
}

/** Open a section of the panel and go to its field. */
export function showSection(section) {
  document.dispatchEvent(new CustomEvent("open-panel"));
  byId(`section-${section}`).open = true;
  document.querySelector(`[data-setting=${section}]`).focus();
}

/** Show the model's defaults in empty fields. */
export function showDefaults(defaults) {
  for (const { name, fallback } of SAMPLING) {
    document.querySelector(`[data-setting=${name}]`).placeholder = defaults[name] ?? fallback;
  }
}

const THEMES = { auto: "light", light: "dark", dark: "auto" };

/** The button switches auto, light, dark in turn; auto follows the system. */
export function bindTheme() {
  const button = byId("theme");
  const show = () => {
    const name = theme.read() || "auto";
    document.documentElement.dataset.theme = name;
    button.setAttribute("aria-label", `Theme: ${name}`);
    button.title = `Theme: ${name}`;
    document.dispatchEvent(new CustomEvent("theme"));
  };
  button.addEventListener("click", () => {
    const next = THEMES[theme.read() || "auto"];
    theme.write(next === "auto" ? "" : next);
    show();
  });
  show();
}

let asking = null; // the promise of the open dialog

/**
 * Ask for the API key; dispatches "key" on the document once one is entered.
 * @param {string} reason why
 * @returns {Promise<boolean>} whether one was entered
 */
export function askForKey(reason) {
  if (asking) return asking;
  const dialog = byId("key-dialog");
  byId("key-reason").textContent = reason;
  byId("key").value = key.read();
  byId("keep-key").checked = key.isKept();
  dialog.returnValue = "";
  dialog.showModal();
  byId("key").select();
  asking = new Promise((resolve) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      key.write(byId("key").value.trim(), byId("keep-key").checked);
      dialog.close("entered");
    };
    byId("cancel-key").onclick = () => dialog.close();
    dialog.onclose = () => {
      asking = null;
      resolve(dialog.returnValue === "entered");
      if (dialog.returnValue) document.dispatchEvent(new CustomEvent("key"));
    };
  });
  return asking;
}
