// Requests that chat completions cannot make: with MCP servers, whose tools the server itself calls, or in the background,
// where an answer goes on when its page is closed. POST /v1/responses, said in the words of a streamed chat completion.

const item = ({ role, content, tool_calls: calls = [], tool_call_id: id }) => {
  if (role === "tool") return [{ type: "function_call_output", call_id: id, output: content }];
  const asked = calls.map((call) => ({ type: "function_call", call_id: call.id, ...call.function }));
  return [...(content ? [{ role, content: Array.isArray(content) ? content.map(part) : content }] : []), ...asked];
};

const part = ({ type, text, image_url: image }) => (type === "text" ? { type: "input_text", text } : { type: "input_image", image_url: image.url });

/** The body of POST /v1/responses for the body of a chat completion with `mcp_servers`, a list of labels, or `background`. */
export function responseBody(body) {
  const { messages, tools = [], mcp_servers: labels = [], max_tokens: most, response_format: format, stream_options: options, logprobs, top_logprobs: top, ...rest } = body;
  const servers = labels.map((label) => ({ type: "mcp", server_label: label, require_approval: "never" }));
  return {
    ...rest,
    input: messages.flatMap(item),
    tools: [...tools.map((tool) => ({ type: "function", ...tool.function, strict: tool.function.strict ?? false })), ...servers],
    store: Boolean(body.background),
    ...(most && { max_output_tokens: most }),
    ...(format && { text: { format: { type: "json_schema", ...format.json_schema } } }),
  };
}

/**
 * Chunks of a chat completion from the events of a response, each with the number of its event; the last has nothing but
 * `is_last`. A call that the server made is a `hosted_call` of a delta, a further message begins with `is_next`.
 * @param {AsyncIterable<string>} events
 * @yields {object}
 */
export async function* chunksOf(events) {
  for await (const data of events) {
    const event = JSON.parse(data);
    yield { ...chunkOf(event), at: event.sequence_number, response_id: event.response?.id };
    if (event.type === "response.completed" || event.type === "response.incomplete") yield { is_last: true };
  }
}

const delta = (values, finish = null) => ({ choices: [{ index: 0, delta: values, finish_reason: finish }] });

function chunkOf({ type, item: done, response, ...event }) {
  if (type === "response.output_text.delta") return delta({ content: event.delta });
  if (type === "response.reasoning_text.delta") return delta({ reasoning_content: event.delta });
  if (type === "response.output_item.added" && done.type === "message") return delta({ is_next: true });
  if (type === "response.output_item.done") return delta(callOf(done));
  if (type === "error" || type === "response.failed") return { error: response?.error ?? event };
  if (type !== "response.completed" && type !== "response.incomplete") return {};
  const { output_tokens: tokens, input_tokens: prompt, input_tokens_details: details } = response.usage;
  const usage = { completion_tokens: tokens, prompt_tokens: prompt, prompt_tokens_details: details };
  return { ...delta({}, type.endsWith("incomplete") ? "length" : "stop"), usage };
}

/** The delta of a complete item: a call to answer, one that the server has made, or a list of tools that failed. */
function callOf({ type, call_id: id, name = "", arguments: given = "", server_label: server, output, error }) {
  if (type === "function_call") return { tool_calls: [{ id, function: { name, arguments: given } }] };
  const fault = error && (error.message ?? error.content?.map(({ text }) => text).join(" ") ?? String(error));
  if (!type.startsWith("mcp_") || !(name || fault)) return {};
  return { hosted_call: { server, name, arguments: given, result: fault ? `Failed: ${fault}` : output ?? "" } };
}
