// Makes the body of a chat completion from a conversation and the settings. An invalid field is a Fault that names it.

import { settings } from "./store.js";

/** Numeric parameters. An empty field is not sent, so the model's default holds. */
export const SAMPLING = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, fallback: 1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05, fallback: 1 },
  { name: "top_k", label: "Top k", min: 0, step: 1, fallback: "off" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.05, fallback: 0 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 2, step: 0.05, fallback: 1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, fallback: 0 },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, fallback: "all that fit" },
  { name: "seed", label: "Seed", step: 1, fallback: "random" },
];

/** A field of the page has invalid content. */
export class Fault extends Error {
  constructor(section, message) {
    super(message);
    this.section = section;
  }
}

function parse(section, text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Fault(section, text.trim() ? `${what} is not valid JSON: ${error.message}` : `${what} is missing.`);
  }
}

/** Tools from JSON: a function or a list of them, bare or as `{"type": "function", "function": ...}`. */
export function readTools(text) {
  const given = [parse("tools", text, "The list of functions")].flat();
  if (!given.length) throw new Fault("tools", "Declare at least one function.");
  return given.map((tool, index) => {
    const inner = tool?.function ?? tool;
    if (typeof inner?.name !== "string" || !/^[\w-]{1,64}$/.test(inner.name)) {
      throw new Fault("tools", `Function ${index + 1}: "name" must be 1 to 64 letters, digits, _ or -.`);
    }
    if (inner.parameters !== undefined && (typeof inner.parameters !== "object" || Array.isArray(inner.parameters))) {
      throw new Fault("tools", `${inner.name}: "parameters" must be a JSON schema of an object.`);
    }
    return { type: "function", function: inner };
  });
}

/** A JSON schema from JSON. */
export function readSchema(text) {
  const schema = parse("schema", text, "The schema");
  if (schema === null || typeof schema !== "object" || Array.isArray(schema)) {
    throw new Fault("schema", "A schema must be a JSON object.");
  }
  return schema;
}

/**
 * @param {import("./store.js").Message[]} messages
 * @param {object} stats of GET /stats
 */
export function buildBody(messages, stats) {
  const body = {
    model: stats?.model,
    messages: wireMessages(messages),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const { name } of SAMPLING) if (settings[name] !== undefined) body[name] = settings[name];
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (settings.tools_on && stats?.has_tools !== false) {
    body.tools = readTools(settings.tools);
    // If a call were required after a result, too, the model could never answer in words.
    body.tool_choice = messages.at(-1)?.role === "tool" ? "auto" : settings.tool_choice;
  }
  if (settings.schema_on) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: readSchema(settings.schema) } };
  }
  if (stats?.thinking) body.chat_template_kwargs = settings.thinking ? stats.thinking.on : stats.thinking.off;
  if (settings.probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

function wireMessages(messages) {
  const wire = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  for (const { role, content, calls, call_id: callId } of messages) {
    if (role === "tool") wire.push({ role, tool_call_id: callId, content });
    else if (role === "user") wire.push({ role, content });
    else if (calls?.length) wire.push({ role, content: content || null, tool_calls: calls.map(wireCall) });
    else if (content) wire.push({ role, content });
  }
  return wire;
}

const wireCall = (call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } });
