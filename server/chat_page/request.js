// Makes the body of a chat completion from messages and settings. An invalid field is a Fault that names it.

import { isPicture, maySee } from "./pictures.js";

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
function readTools(text) {
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

/** The tools of a conversation: functions, which may be missing if MCP servers have tools. */
export const toolsOf = ({ tools, mcp_servers: servers }) => (servers?.length && !tools.trim() ? [] : readTools(tools));

/** A JSON schema from JSON. */
export function readSchema(text) {
  const schema = parse("schema", text, "The schema");
  if (schema === null || typeof schema !== "object" || Array.isArray(schema)) {
    throw new Fault("schema", "A schema must be a JSON object.");
  }
  return schema;
}

/** The kwargs that switch reasoning on or off, if the template has such a switch. */
const thinkingOf = (settings, model) => (model?.thinking ? { chat_template_kwargs: settings.thinking ? model.thinking.on : model.thinking.off } : {});

/** A model that can do the same, and sees no pictures: it gets their names. */
export const blind = (model) => ({ ...model, input_modalities: ["text"] });

/** The body of POST /tokenize for the same messages. A list of tools that is not valid counts as none. */
export function buildCount(path, settings, model) {
  const body = { model: settings.model || model?.name, messages: wireMessages(path, settings, model), ...thinkingOf(settings, model) };
  if (!settings.tools_on || model?.has_tools === false) return body;
  try {
    const tools = toolsOf(settings);
    return { ...body, ...(tools.length && { tools }) };
  } catch {
    return body;
  }
}

/**
 * @param {import("./conversation.js").Message[]} path
 * @param {object} settings of the conversation
 * @param {{name: string, has_tools: boolean, thinking: object|null, input_modalities: string[]|null}|null} model null if it is not known yet
 */
export function buildBody(path, settings, model) {
  const body = {
    model: settings.model || model?.name,
    messages: wireMessages(path, settings, model),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const { name } of SAMPLING) if (settings[name] != null) body[name] = settings[name];
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (settings.tools_on && model?.has_tools !== false) {
    const [tools, servers] = [toolsOf(settings), (settings.mcp_servers ?? []).filter((label) => model?.mcp_servers.includes(label))];
    if (tools.length) body.tools = tools;
    if (servers.length) body.mcp_servers = servers;
    // If a call were required after a result, too, the model could never answer in words.
    if (tools.length || servers.length) body.tool_choice = path.at(-1)?.role === "tool" ? "auto" : settings.tool_choice;
  }
  if (settings.schema_on) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: readSchema(settings.schema) } };
  }
  Object.assign(body, thinkingOf(settings, model));
  if (settings.background && !settings.probabilities) body.background = true; // only the others' streams have tokens
  if (settings.probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

/**
 * What of a path is sent. Many templates want users and answers to take turns, so a past turn is sent only as far as
 * there is an answer in words: not one that failed, was stopped before its first word, or waits for results.
 * @param {import("./conversation.js").Message[]} path its last turn is sent whole if it waits for an answer
 * @returns {import("./conversation.js").Message[]}
 */
export function sentPath(path) {
  const turns = turnsOf(path);
  const isOpen = turns.length > 0 && path.at(-1).role !== "assistant";
  return turns.flatMap((turn, index) => {
    if (turn[0].role !== "user") return [];
    if (isOpen && index === turns.length - 1) return turn;
    const end = turn.findLastIndex(({ role, content }) => role === "assistant" && content);
    return end < 0 ? [] : turn.slice(0, end + 1);
  });
}

/** @returns {Map<string, string>} the results of a message's calls, by the calls' ids, which other messages may repeat */
export function resultsOf(path, message) {
  const from = path.indexOf(message) + 1;
  const end = path.findIndex(({ role }, index) => index >= from && role !== "tool");
  return new Map(path.slice(from, end < 0 ? path.length : end).map((result) => [result.call_id, result.content]));
}

/** @returns {import("./conversation.js").Message[][]} the turns behind the last cut */
export function turnsOf(path) {
  const turns = [];
  for (const message of path.slice(path.findLastIndex(({ cut }) => cut) + 1)) {
    if (message.role === "user" || !turns.length) turns.push([]);
    turns.at(-1).push(message);
  }
  return turns;
}

/** The summary that stands for what is not sent, if any. */
const summaryOf = (path) => path.findLast(({ cut }) => cut)?.cut.summary;

/** Messages as the API takes them. */
export function wireMessages(path, settings, model) {
  const wire = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const sent = sentPath(path);
  const summary = summaryOf(path);
  for (const message of sent) {
    const { role, content, calls, call_id: callId } = message;
    if (role === "tool") wire.push({ role, tool_call_id: callId, content });
    else if (role === "user") wire.push({ role, content: withFiles(message, message === sent[0] && summary, maySee(model)) });
    else if (calls?.length && calls.every(({ id }) => resultsOf(sent, message).has(id))) {
      wire.push({ role, content: content || null, tool_calls: calls.map(wireCall) });
    } else if (content) wire.push({ role, content });
  }
  return wire;
}

/** A user's words behind the summary and the files that belong to them; behind pictures, they are one of several parts. */
function withFiles({ content, files = [] }, summary, isSeen) {
  const pictures = isSeen ? files.filter(isPicture) : [];
  const parts = summary ? [`Summary of what was said before:\n${summary}`] : [];
  for (const file of files) {
    if (!isPicture(file)) parts.push(`${file.name}:\n${fenced(file.text)}`);
    else if (!isSeen) parts.push(`[Picture: ${file.name}]`);
  }
  const words = [...parts, content].filter(Boolean).join("\n\n");
  if (!pictures.length) return words;
  return [...pictures.map(({ url }) => ({ type: "image_url", image_url: { url } })), ...(words ? [{ type: "text", text: words }] : [])];
}

/** A text between fences that are longer than any in it. */
export function fenced(text, language = "") {
  const longest = (text.match(/`+/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

const wireCall = (call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } });
