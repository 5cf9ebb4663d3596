// Client of the server's API: JSON, and chat completions as a stream of chunks. URLs are relative, so that the page
// works behind a proxy that serves it under a path.

import { key } from "./local.js";
import { chunksOf, responseBody } from "./responses.js";

/** Longest wait for the state of the server. */
const STATS_MS = 10_000;

/** An error from the server or the network. `status` is 0 if there was no response; `code` is the API's, or "". */
export class ApiError extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    Object.assign(this, { status, code });
  }
}

function headers() {
  const bytes = new TextEncoder().encode(key.read()); // fetch wants one character per byte of a header
  return bytes.length ? { authorization: `Bearer ${String.fromCharCode(...bytes)}` } : {};
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...options.headers, ...headers() } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const isAway = error instanceof TypeError || error.name === "TimeoutError";
    throw new ApiError(isAway ? "The server cannot be reached." : error.message);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw failure(body.error ?? { message: `The server answered ${response.status}.` }, response.status, response.headers.get("retry-after"));
}

/** What happened, by the API's code or the status; the server's own words say more. */
const EVENTS = {
  shutting_down: "The server was shut down.",
  engine_restarting: "The engine is away: it died, hangs or is loading, and comes back by itself.",
  model_loading: "The model is being loaded.",
  invalid_api_key: "The API key is missing, or is accepted no more.",
  queue_full: "Too many requests are waiting.",
  429: "The limit of this API key is reached.",
};

function failure({ message, code = "" }, status, seconds) {
  const event = EVENTS[code] ?? EVENTS[status];
  const wait = Number(seconds) > 0 ? ` Try again in ${seconds} s.` : "";
  return new ApiError((event ? `${event} (${message})` : message) + wait, status, code ?? "");
}

/**
 * GET /stats: what a model can do, and its engine.
 * @param {string} model "" for the one that is served first
 */
export async function readStats(model) {
  const path = model ? `stats?model=${encodeURIComponent(model)}` : "stats";
  const signal = AbortSignal.timeout(STATS_MS); // or a request that gets lost would be the last one
  return (await request(path, { cache: "no-store", signal })).json();
}

/**
 * GET /v1/models.
 * @returns {Promise<{defaults: Map<string, object>, hearing: string}>} the sampling parameters of requests that set none,
 *   by the names of the models that chat; and the first model that hears, "" for none
 */
export async function readModels() {
  const { data, models } = await (await request("v1/models", {})).json();
  const cards = new Map(data.map((card) => [card.id, card.default_sampling_params ?? {}]));
  const hearing = data.find(({ input_modalities: inputs }) => inputs?.includes("audio"))?.id ?? "";
  return { defaults: new Map((models ?? []).map(({ slug }) => [slug, cards.get(slug)])), hearing };
}

const json = (body) => ({ method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

/**
 * POST /tokenize.
 * @param {object} body
 * @returns {Promise<number>} the tokens of a prompt
 */
export async function countTokens(body, signal) {
  return (await (await request("tokenize", { ...json(body), signal })).json()).count;
}

/**
 * POST /v1/audio/transcriptions.
 * @param {Blob} sound
 * @returns {Promise<string>} what is said in it
 */
export async function transcribe(sound, model, signal) {
  const body = new FormData();
  body.append("model", model);
  body.append("file", sound, "speech");
  return (await (await request("v1/audio/transcriptions", { method: "POST", body, signal })).json()).text;
}

/**
 * POST /v1/chat/completions, streamed; what only responses can do, POST /v1/responses.
 * @param {object} body
 * @param {AbortSignal} signal ends the stream and the request
 * @yields {object} chunks
 * @throws {ApiError} before the first chunk or between two chunks
 */
export async function* streamChat(body, signal) {
  const [path, given, chunks] = body.mcp_servers || body.background ? ["v1/responses", responseBody(body), chunksOf] : ["v1/chat/completions", body, parsed];
  yield* read(await request(path, { ...json(given), signal }), chunks);
}

/** The rest of an answer in the background, behind the event of this number. */
export async function* resumeChat({ response_id: id, at }, signal) {
  const query = at === undefined ? "" : `&starting_after=${at}`;
  yield* read(await request(`v1/responses/${id}?stream=true${query}`, { signal }), chunksOf);
}

/** End an answer in the background, or forget it. */
export const forgetResponse = (id) => request(`v1/responses/${id}`, { method: "DELETE" }).catch(() => {});

async function* read(response, chunks) {
  for await (const chunk of chunks(events(response.body))) {
    if (chunk.is_last) return;
    if (chunk.error) throw failure(chunk.error, 500);
    yield chunk;
  }
  throw new ApiError("The connection was lost before the answer was complete.");
}

async function* parsed(events) {
  for await (const data of events) yield data.startsWith("[DONE]") ? { is_last: true } : JSON.parse(data);
}

/** The data of server-sent events, without comments and other fields. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } catch (error) {
    throw error instanceof TypeError ? new ApiError("The connection was lost before the answer was complete.") : error;
  } finally {
    reader.cancel().catch(() => {});
  }
}
