// The open conversation: what can be done with it, and with each of its messages.

import { newAnswer } from "./answer.js";
import { Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { current } from "./local.js";
import { LogView } from "./log_view.js";
import { Fault, buildBody } from "./request.js";
import { Runs } from "./runs.js";
import { askForKey, showSection } from "./settings_view.js";
import { readConversation, release, writeConversation } from "./store.js";

export class Chat {
  /**
   * @param {object} hooks
   * @param {() => void} hooks.onChange after a change that the list of conversations or the composer shows
   * @param {() => void} hooks.onOpen
   * @param {(message: object) => void} hooks.onEdit
   * @param {(example: object) => void} hooks.onExample
   * @param {(text: string, undo: () => void) => void} hooks.onUndoable
   */
  constructor(hooks) {
    Object.assign(this, { hooks, conversation: new Conversation({}), known: new Map() });
    /** Ids of conversations with an answer that nobody has seen. */
    this.unseen = new Set();
    this.runs = new Runs((run) => this.log.draw(run.message), (run, error) => this.finish(run, error));
    this.log = new LogView(this);
  }

  /** What the model of this conversation can do; null if that is not known yet. */
  get model() {
    return this.known.get(this.conversation.settings.model ?? "") ?? null;
  }

  get isRunning() {
    return this.runs.of(this.conversation).length > 0;
  }

  open(conversation) {
    this.conversation = conversation;
    this.unseen.delete(conversation.id);
    release((other) => other === conversation || this.runs.of(other).length);
    current.write(conversation.id);
    this.log.clear();
    this.hooks.onOpen();
    this.show();
    for (const node of conversation.nodes.values()) if (this.runs.canResume(node)) this.resume(node);
    this.log.scrollToEnd();
  }

  // --- asking ------------------------------------------------------------------------------------------------------

  /**
   * Send a message behind the last one, or in the place of one, which stays as an alternative.
   * @param {{content: string, files?: object[]}} values
   * @param {import("./conversation.js").Message|null} edited
   * @throws {Fault} before anything is sent or changed
   */
  ask(values, edited = null) {
    const { conversation } = this;
    const parent = edited ? conversation.nodes.get(edited.parent) : conversation.fullPath().at(-1);
    this.check([...this.pathTo(parent), { role: "user", ...values }]);
    const user = conversation.add(parent, { role: "user", ...values, ...(edited && { is_alternative: true }) });
    this.answer(user);
  }

  /** Request another answer beside this one. */
  retry(message) {
    if (this.isRunning) return;
    this.attempt(() => {
      const parent = this.conversation.nodes.get(message.parent);
      this.check(this.pathTo(parent));
      this.answer(parent, true);
    });
  }

  /** Let an answer that was cut go on where it ended. */
  goOn(message) {
    if (message.response_id) return void this.resume(message);
    this.attempt(() => {
      const { response_format: schema, mcp_servers: servers, tool_choice: choice, background, ...body } = this.check(this.pathTo(message));
      for (const name of ["finish", "error", "error_code"]) delete message[name];
      this.conversation.touch(message);
      this.runs.start(this.conversation, message, { ...body, continue_final_message: true });
      this.save();
      this.show();
    });
  }

  /** Read on an answer in the background. */
  resume(message) {
    for (const name of ["finish", "error", "error_code", "is_left"]) delete message[name];
    this.conversation.touch(message);
    this.runs.start(this.conversation, message, null);
    this.change();
  }

  answerCalls(message, results, given) {
    for (const call of message.calls) if (given.has(call.id)) call.arguments = given.get(call.id);
    if (given.size) this.conversation.touch(message);
    const tools = message.calls.map((call) => ({ role: "tool", call_id: call.id, content: results.get(call.id) }));
    this.attempt(() => {
      this.check([...this.pathTo(message), ...tools]);
      this.log.views.delete(message.id); // what is typed there is sent
      this.answer(tools.reduce((parent, values) => this.conversation.add(parent, values), message));
    });
  }

  /** The messages from the first to this one. */
  pathTo(message) {
    const path = [];
    for (let at = message; at; at = this.conversation.nodes.get(at.parent)) if (!at.is_deleted) path.unshift(at);
    return path;
  }

  check = (path) => buildBody(path, this.conversation.settings, this.model);

  answer(parent, isAlternative = false) {
    const { conversation } = this;
    const { settings } = conversation;
    const body = this.check(this.pathTo(parent));
    const { messages, stream, stream_options: options, tools, ...asked } = body;
    const message = conversation.add(parent, { ...newAnswer(), is_json: settings.schema_on, is_alternative: isAlternative, asked });
    this.runs.start(conversation, message, body);
    this.save();
    this.show();
    this.log.scrollToEnd();
  }

  async finish({ conversation, message }, error) {
    const isShown = conversation === this.conversation;
    conversation.touch(message);
    if (!isShown) this.unseen.add(conversation.id);
    if (isShown) this.show();
    if (isShown) announce(message);
    await this.save(conversation);
    if (error?.status !== 401 || !(await askForKey(error.message)) || conversation !== this.conversation) return;
    if (conversation.path().at(-1) === message) this.retry(message);
  }

  stop() {
    this.runs.stop(this.conversation);
  }

  // --- changing ----------------------------------------------------------------------------------------------------

  /** Put an answer with other words beside this one. */
  rewrite(message, content) {
    const { id, chat, born, changed, picked, moved, tokens, error, error_code: code, parent, ...rest } = message;
    const values = { ...rest, content, finish: "stop", is_alternative: true, is_edited: true };
    this.conversation.add(this.conversation.nodes.get(parent), values);
    this.change();
  }

  remove(message) {
    const { conversation } = this;
    for (const { message: running, abort } of this.runs.of(conversation)) if (this.pathTo(running).includes(message)) abort.abort();
    const removed = conversation.remove(message);
    this.change();
    const what = message.role === "user" ? "The message and its answer are deleted." : "The answer is deleted.";
    this.hooks.onUndoable(what, () => {
      for (const node of removed) {
        node.is_deleted = false;
        conversation.touch(node);
      }
      this.change(conversation);
    });
  }

  pick(message) {
    this.conversation.pick(message);
    this.change();
  }

  change(conversation = this.conversation) {
    this.save(conversation);
    if (conversation === this.conversation) this.show();
  }

  /** Run an action; if a field of the panel is invalid, go to that field. Returns whether the action succeeded. */
  attempt(action) {
    try {
      action();
      return true;
    } catch (error) {
      if (!(error instanceof Fault)) throw error;
      byId("announcer").textContent = error.message;
      showSection(error.section);
      return false;
    }
  }

  async save(conversation = this.conversation) {
    await writeConversation(conversation);
    if (conversation === this.conversation) this.show(); // with what other tabs have added
    else this.hooks.onChange();
  }

  /** Show what another tab has saved. */
  async sync() {
    const { conversation } = this;
    if (!conversation.isStored || !(await readConversation(conversation.id))) return;
    if (conversation === this.conversation) this.show();
  }

  show() {
    this.log.show();
    this.hooks.onChange();
  }

  /** What can be done with a message now. @returns {import("./message_view.js").Actions} */
  actions(message, { options, isRunning, canAnswer, isLast }) {
    const isAnswer = message.role === "assistant";
    return {
      alternatives: {
        index: options.indexOf(message),
        count: options.length,
        onPick: (step) => this.pick(options[options.indexOf(message) + step]),
        onCompare: isAnswer ? () => this.log.compare(message.parent) : null,
      },
      onEdit: isRunning || (isAnswer && !message.content) ? null : () => this.hooks.onEdit(message),
      onRetry: isAnswer && !isRunning ? () => this.retry(message) : null,
      onContinue: isLast && !isRunning && isCut(message) ? () => this.goOn(message) : null,
      onRemove: this.runs.has(message) ? null : () => this.remove(message),
      onResults: canAnswer ? (results, given) => this.answerCalls(message, results, given) : null,
    };
  }
}

/** Whether an answer can go on: what follows a schema cannot, since the schema would begin anew. */
const isCut = ({ role, content, calls, finish, is_json: isJson }) => role === "assistant" && content && !calls?.length && !isJson && finish !== "stop";

/** Announce the complete answer to screen readers; one that grows token by token cannot be followed. */
function announce(message) {
  const calls = message.calls.map((call) => `Call of ${call.name}.`).join(" ");
  const stopped = message.finish === "stopped" ? "Stopped. " : "";
  byId("announcer").textContent = message.error ?? `${stopped}${message.content} ${calls}`;
}
