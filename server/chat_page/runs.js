// The answers that are being written. They go on whatever conversation is shown, and end with the page.

import { Answer } from "./answer.js";
import { ApiError, forgetResponse, resumeChat, streamChat } from "./api.js";
import { ALIVE_MS } from "./conversation.js";
import { rescueAll, writeGrowing } from "./store.js";

const SAVE_MS = 3000;

export class Runs {
  /**
   * @param {(run: Run) => void} onGrow after every chunk
   * @param {(run: Run, error: Error|null) => void} onEnd
   *
   * @typedef {{conversation: import("./conversation.js").Conversation, message: import("./conversation.js").Message,
   *   abort: AbortController}} Run
   */
  constructor(onGrow, onEnd) {
    Object.assign(this, { onGrow, onEnd });
    /** @type {Map<string, Run>} by the message's id */
    this.running = new Map();
  }

  /** Whether this message grows here. */
  has = (message) => this.running.has(message.id);

  /** @returns {Run[]} those of a conversation */
  of = (conversation) => [...this.running.values()].filter((run) => run.conversation === conversation);

  stop(conversation) {
    for (const { abort } of this.of(conversation)) abort.abort();
  }

  /** Whether an answer in the background grows in no page. */
  canResume(message) {
    const { response_id: id, finish, is_left: isLeft, changed } = message;
    return Boolean(id) && !finish && !this.has(message) && (isLeft || Date.now() > changed + ALIVE_MS);
  }

  /** Let a message grow by the answer to `body`; null: by the rest of one in the background. */
  async start(conversation, message, body) {
    const run = { conversation, message, abort: new AbortController() };
    this.running.set(message.id, run);
    const answer = new Answer(message);
    let [saved, error] = [Date.now(), null];
    try {
      for await (const chunk of body ? streamChat(body, run.abort.signal) : resumeChat(message, run.abort.signal)) {
        answer.add(chunk);
        this.onGrow(run);
        if (Date.now() < saved + SAVE_MS || run.abort.signal.aborted) continue;
        saved = Date.now();
        writeGrowing(conversation, message);
      }
    } catch (caught) {
      if (run.abort.signal.aborted) message.finish = "stopped";
      else if (!body && caught.status === 404) message.finish = "interrupted"; // the server has forgotten it
      else error = caught;
    }
    if (error) Object.assign(message, { error: error.message, error_code: error.code });
    if (error && !(error instanceof ApiError)) console.error(error);
    message.finish ??= error ? "error" : "stop";
    if (message.response_id && message.finish !== "error") {
      forgetResponse(message.response_id);
      for (const name of ["response_id", "at"]) delete message[name];
    }
    this.running.delete(message.id);
    this.onEnd(run, error);
  }

  /** Keep what has come of every answer, and what is not stored yet, as the page is closed. */
  leave() {
    for (const { conversation, message } of this.running.values()) conversation.touch(message);
    const ended = ({ response_id: id }) => (id ? { is_left: true } : { finish: "interrupted" });
    rescueAll((message) => (this.has(message) ? { ...message, ...ended(message) } : message));
  }
}
