// Builds a message from the chunks of an answer, with its times in milliseconds.

const MIN_MS = 20; // a shorter time gives no meaningful rate

/** @returns {import("./conversation.js").Message} */
export function newAnswer() {
  return { role: "assistant", content: "", reasoning: "", calls: [], tokens: [], stats: {} };
}

/** Grows one message from chunks. */
export class Answer {
  /** @param {import("./conversation.js").Message} message */
  constructor(message) {
    this.message = message;
    this.start = performance.now();
    this.first = null;
    this.numBefore = message.stats.tokens ?? 0; // of an answer that goes on
    this.decoder = new TextDecoder(); // for tokens: a character may be split over several
  }

  /** @param {object} chunk of a streamed chat completion */
  add(chunk) {
    const now = performance.now();
    const { message } = this;
    if (message.asked?.background) Object.assign(message, { at: chunk.at, response_id: chunk.response_id ?? message.response_id });
    const [choice] = chunk.choices ?? [];
    if (choice) this.addDelta(choice.delta ?? {}, now);
    const shown = choice?.delta?.content ? choice.logprobs?.content : null; // no tokens of reasoning and calls
    for (const { token, logprob, bytes, top_logprobs: top } of shown ?? []) {
      const text = this.decoder.decode(Uint8Array.from(bytes), { stream: true });
      message.tokens.push([token, logprob, top.map((other) => [other.token, other.logprob]), text]);
    }
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    if (chunk.usage) this.count(chunk.usage, now);
  }

  addDelta(delta, now) {
    const { message } = this;
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    if (delta.is_next && message.content) message.content += "\n\n";
    if (delta.hosted_call) (message.hosted ??= []).push(delta.hosted_call);
    if (!(reasoning || delta.content || delta.tool_calls)) return;
    if (this.first === null) {
      this.first = now;
      message.stats.first ??= now - this.start;
    }
    message.reasoning += reasoning;
    if (message.reasoning && !message.content && !message.calls.length) message.stats.thought = now - this.first;
    message.content += delta.content ?? "";
    for (const part of delta.tool_calls ?? []) {
      const call = (message.calls[part.index ?? message.calls.length] ??= { id: part.id, name: "", arguments: "" });
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
  }

  /** Update the number of tokens and their rate from the server's count: an event may hold several tokens. */
  count(usage, now) {
    const { stats } = this.message;
    const { completion_tokens: number } = usage;
    if (this.first === null || this.numBefore + number === stats.tokens) return;
    this.numFirst ??= number; // of the first event
    stats.tokens = this.numBefore + number;
    stats.prompt = usage.prompt_tokens;
    stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    if (now > this.first + MIN_MS) stats.rate = ((number - this.numFirst) / (now - this.first)) * 1000;
  }
}

const seconds = (ms) => (ms < 995 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 9950 ? 1 : 0)} s`);

/** The duration of the reasoning, in words. */
export const thoughtFor = (stats) => (stats.thought > 50 ? `Thought for ${seconds(stats.thought)}` : "Thought");

/** The known figures of an answer's speed, as short texts. */
export function describe(stats) {
  const parts = [];
  if (stats.first !== undefined) parts.push(`${seconds(stats.first)} to first token`);
  if (stats.rate) parts.push(`${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tokens/s`);
  if (stats.tokens) parts.push(`${stats.tokens} tokens`);
  if (stats.prompt) parts.push(`prompt ${stats.prompt}${stats.cached ? `, ${stats.cached} cached` : ""}`);
  return parts;
}
