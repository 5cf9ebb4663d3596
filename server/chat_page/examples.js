// Examples for new users: prompts, a tool and a schema.

export const TOOLS = [
  {
    name: "get_weather",
    description: "The weather in a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string", description: "Name of the city" } },
      required: ["city"],
      additionalProperties: false,
    },
  },
];

export const SCHEMA = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 30 },
    age: { type: "integer", minimum: 0, maximum: 120 },
    likes: { type: "array", items: { type: "string", maxLength: 20 }, minItems: 1, maxItems: 3 },
  },
  required: ["name", "age", "likes"],
  additionalProperties: false,
};

const plain = { tools_on: false, schema_on: false };

/** A title, a prompt, and the settings that it needs. */
export const EXAMPLES = [
  { title: "Explain", prompt: "What is a KV cache?", settings: plain },
  { title: "Calculate", prompt: "What is 27 + 58?", settings: plain },
  { title: "Sort", prompt: "Sort pear, apple, fig", settings: plain },
  { title: "Tell", prompt: "Tell me a story about Mia and a fox", settings: plain },
  {
    title: "Call a tool",
    prompt: "What is the weather in Oslo?",
    settings: { tools_on: true, schema_on: false, tools: JSON.stringify(TOOLS, null, 2), tool_choice: "auto" },
  },
  {
    title: "Fill a schema",
    prompt: "Mia is 7 and likes foxes and figs. Answer as JSON.",
    settings: { tools_on: false, schema_on: true, schema: JSON.stringify(SCHEMA, null, 2) },
  },
];
