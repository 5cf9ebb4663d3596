// How full the context is, counted by the server as one writes; and the ways on when it is full: to leave out the oldest
// turns, or to have the model summarise them. Both can be undone where they are shown.

import { countTokens, streamChat } from "./api.js";
import { countPicture } from "./attachments.js";
import { byId } from "./dom.js";
import { isPicture, maySee } from "./pictures.js";
import { blind, buildBody, buildCount, sentPath, turnsOf, wireMessages } from "./request.js";

const WAIT_MS = 400;
const FULL = 0.8; // of the context, from which on ways on are offered
const KEPT = 0.5; // of the context, at most, that is left by them
const SUMMARISED = 0.6; // of the context, at most, that is given to a summary
const MAX_SUMMARY = 400; // tokens
const PICTURE = 2000; // letters that a picture counts for among turns
const REQUEST = "Summarise our conversation so far, so that it can go on without these words: facts, decisions, names, numbers and open questions. Give only the summary.";

/** A message without its pictures, which are not sent again at every letter. */
const wordsOf = ({ files = [], ...message }) => ({ ...message, files: files.filter((file) => !isPicture(file)) });

export class Context {
  /**
   * @param {import("./chat.js").Chat} chat
   * @param {import("./composer.js").Composer} composer
   */
  constructor(chat, composer) {
    Object.assign(this, { chat, composer, timer: 0, asked: "", count: 0, fault: "", summarising: null });
    byId("leave-out").addEventListener("click", () => this.leaveOut());
    byId("summarise").addEventListener("click", () => this.summarise());
  }

  /** What would be sent: with what is written, if anything is. */
  get path() {
    const { edited, values } = this.composer;
    const path = edited ? this.chat.pathTo(this.chat.conversation.nodes.get(edited.parent)) : this.chat.conversation.path();
    return values.content.trim() || values.files?.length ? [...path, { role: "user", ...values }] : path;
  }

  /** Count again, once nothing changes for a moment. */
  refresh() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.measure(), WAIT_MS);
  }

  async measure() {
    const { chat, path } = this;
    if (!path.length || !chat.model?.max_model_len || chat.isRunning) return void (path.length || this.show(0, ""));
    const pictures = maySee(chat.model) ? sentPath(path).flatMap(({ files = [] }) => files.filter(isPicture)) : [];
    const body = buildCount(pictures.length ? path.map(wordsOf) : path, chat.conversation.settings, chat.model);
    const asked = JSON.stringify([body, pictures.map(({ url }) => url.length)]);
    if (asked === this.asked) return;
    this.asked = asked;
    this.abort?.abort();
    this.abort = new AbortController();
    try {
      const count = body.messages.length ? await countTokens(body, this.abort.signal) : 0;
      const counts = await Promise.all(pictures.map((picture) => countPicture(picture, chat).catch(() => 0))); // it is told there
      if (this.asked === asked) this.show(counts.reduce((a, b) => a + b, count), "");
    } catch (error) {
      if (this.asked === asked && error.name !== "AbortError") this.show(error.status === 400 ? Infinity : 0, error.message);
      if (this.asked === asked && error.status !== 400) this.asked = "";
    }
  }

  show(count, fault) {
    const { chat } = this;
    const size = chat.model?.max_model_len ?? 0;
    const needed = count + (chat.conversation.settings.max_tokens ?? 1);
    const numTurns = turnsOf(chat.conversation.path()).length;
    Object.assign(this, { count, fault });
    byId("measure").hidden = !count || !size;
    byId("measured").textContent = Number.isFinite(count) ? `${count.toLocaleString("en")} of ${size.toLocaleString("en")} tokens` : `more than ${size.toLocaleString("en")} tokens`;
    Object.assign(byId("meter"), { max: size, high: FULL * size, optimum: 0, value: Math.min(count, size) });
    byId("context").hidden = !size || needed < FULL * size;
    byId("context-ways").hidden = numTurns === 0;
    const alone = numTurns === 0 ? " Shorten the message." : "";
    byId("context-text").textContent = needed > size ? `This does not fit into the context.${fault ? ` ${fault}` : ""}${alone}` : "The context is nearly full.";
  }

  /** The turns to leave out: as few as leave room, by the share of their letters. */
  oldest() {
    const turns = turnsOf(this.chat.conversation.path());
    const lengths = turns.map((turn) => turn.reduce((sum, { content, files }) => sum + content.length + (files ?? []).reduce((all, { text }) => all + (text?.length ?? PICTURE), 0), 0));
    const size = this.chat.model.max_model_len;
    const total = lengths.reduce((a, b) => a + b, this.composer.values.content.length) || 1;
    const perLetter = Number.isFinite(this.count) && this.count ? this.count / total : 1 / 3;
    let rest = total * perLetter;
    let number = 0;
    while (number < turns.length && (number === 0 || rest > KEPT * size)) rest -= lengths[number++] * perLetter;
    return { left: turns.slice(0, number), perLetter };
  }

  cut(conversation, left, summary) {
    const last = left.at(-1).at(-1);
    last.cut = { summary };
    conversation.touch(last);
    this.asked = "";
    this.chat.change(conversation);
  }

  leaveOut() {
    this.cut(this.chat.conversation, this.oldest().left, "");
  }

  async summarise() {
    const { chat, chat: { conversation, model } } = this;
    const { left, perLetter } = this.oldest();
    const room = Math.floor((SUMMARISED * model.max_model_len) / perLetter);
    const earlier = conversation.path().findLast(({ cut }) => cut)?.cut.summary;
    const said = wireMessages(left.flat(), { system: "" }, blind(model)).map(({ role, content }) => `${role}: ${content ?? ""}`);
    const transcript = [...(earlier ? [`summary: ${earlier}`] : []), ...said].join("\n\n").slice(-room);
    const plain = { ...conversation.settings, system: "", tools_on: false, schema_on: false, thinking: false, probabilities: false, background: false, stop: "" };
    const path = [{ role: "user", content: `${REQUEST}\n\n${transcript}` }];
    const body = { ...buildBody(path, plain, model), max_tokens: Math.max(16, Math.min(MAX_SUMMARY, Math.floor(model.max_model_len / 8))) };
    byId("summarise").disabled = true;
    byId("context-text").textContent = "The oldest turns are being summarised…";
    try {
      let summary = "";
      for await (const chunk of streamChat(body)) summary += chunk.choices?.[0]?.delta?.content ?? "";
      if (summary.trim()) this.cut(conversation, left, summary.trim());
      else byId("context-text").textContent = "The model gave no summary.";
    } catch (error) {
      byId("context-text").textContent = `There is no summary. ${error.message}`;
    } finally {
      byId("summarise").disabled = false;
    }
  }
}
