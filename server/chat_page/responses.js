// Requests with MCP servers, whose tools the server itself calls: POST /v1/responses, said in the words of a streamed
// chat completion.

const item = ({ role, content, tool_calls: calls = [], tool_call_id: id }) => {
  if (role === "tool") return [{ type: "function_call_output", call_id: id, output: content }];
  const asked = calls.map((call) => ({ type: "function_call", call_id: call.id, ...call.function }));
  return [...(content ? [{ role, content }] : []), ...asked];
};

/** The body of POST /v1/responses for the body of a chat completion with `mcp_servers`, a list of labels. */
export function responseBody(body) {
  const { messages, tools = [], mcp_servers: labels, max_tokens: most, response_format: format, stream_options: options, logprobs, top_logprobs: top, ...rest } = body;
  const servers = labels.map((label) => ({ type: "mcp", server_label: label, require_approval: "never" }));
  return {
    ...rest,
    input: messages.flatMap(item),
    tools: [...tools.map((tool) => ({ type: "function", ...tool.function, strict: tool.function.strict ?? false })), ...servers],
    store: false,
    ...(most && { max_output_tokens: most }),
    ...(format && { text: { format: { type: "json_schema", ...format.json_schema } } }),
  };
}

/**
 * Chunks of a chat completion from the events of a response; the last has nothing but `is_last`. A call that the server
 * made is a `hosted_call` of a delta.
 * @param {AsyncIterable<string>} events
 * @yields {object}
 */
export async function* chunksOf(events) {
  let [numCalls, numMessages] = [0, 0];
  const delta = (values, finish = null) => ({ choices: [{ index: 0, delta: values, finish_reason: finish }] });
  for await (const data of events) {
    const { type, response, item: done, ...event } = JSON.parse(data);
    if (type === "response.output_text.delta") yield delta({ content: event.delta });
    else if (type === "response.reasoning_text.delta") yield delta({ reasoning_content: event.delta });
    else if (type === "response.output_item.added" && done.type === "message" && numMessages++) yield delta({ content: "\n\n" });
    else if (type === "response.output_item.done" && done.type === "function_call") {
      const { call_id: id, name, arguments: given } = done;
      yield delta({ tool_calls: [{ index: numCalls++, id, function: { name, arguments: given } }] });
    } else if (type === "response.output_item.done" && /^mcp_/.test(done.type)) {
      const { server_label: server, name = "", arguments: given = "", output, error } = done;
      const fault = error && (error.message ?? error.content?.map(({ text }) => text).join(" ") ?? String(error));
      if (name || fault) yield delta({ hosted_call: { server, name, arguments: given, result: fault ? `Failed: ${fault}` : output ?? "" } });
    } else if (type === "error" || type === "response.failed") yield { error: response?.error ?? event };
    else if (type === "response.completed" || type === "response.incomplete") {
      const { output_tokens: tokens, input_tokens: prompt, input_tokens_details: details } = response.usage;
      yield { ...delta({}, type.endsWith("incomplete") ? "length" : numCalls ? "tool_calls" : "stop"), usage: { completion_tokens: tokens, prompt_tokens: prompt, prompt_tokens_details: details } };
      yield { is_last: true };
    }
  }
}
