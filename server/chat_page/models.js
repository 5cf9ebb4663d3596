// The choice between the models that are served; hidden where there is one.

import { readModels } from "./api.js";
import { byId, el } from "./dom.js";

let names = [];

function show(chosen) {
  const known = !chosen || names.includes(chosen) ? names : [chosen, ...names]; // one that is served no more can be left
  byId("models").replaceChildren(el("option", { value: "" }, `${names[0] ?? "The first"} (default)`), ...known.map((name) => el("option", { value: name }, name)));
  byId("models").value = chosen;
  byId("model-picker").hidden = names.length < 2 && !chosen;
}

/** Show the model of a conversation; "" is the default. */
export const chooseModel = (name) => show(name ?? "");

/**
 * Offer the models that chat.
 * @param {import("./chat.js").Chat} chat
 * @returns what `readModels` does
 */
export async function showModels(chat) {
  const models = await readModels().catch(() => ({ defaults: new Map(), hearing: "" }));
  names = [...models.defaults.keys()];
  chooseModel(chat.conversation.settings.model);
  return models;
}
