// JSON with line breaks and indentation, for reading. No more of it changes: written anew from its values, a long number
// would lose digits, and a repeated name its first value.

const TOKEN = /"[^"\\]*(?:\\.[^"\\]*)*"|[{}[\],:]|[^\s{}[\],:"]+/g;
const MAX_INDENT = 40; // levels; work is linear in the text

/**
 * @param {string} text
 * @returns {{text: string, isValid: boolean}} as it is where it is no JSON
 */
export function pretty(text) {
  try {
    JSON.parse(text);
  } catch {
    return { text, isValid: false };
  }
  let [shown, before, depth] = ["", ":", 0];
  for (const token of text.match(TOKEN)) {
    const [isBegin, isEnd] = ["[{".includes(before), "]}".includes(token)];
    if (isEnd) depth--;
    if (isBegin ? !isEnd : isEnd || before === ",") shown += `\n${"  ".repeat(Math.min(depth, MAX_INDENT))}`;
    shown += token === ":" ? ": " : token;
    if ("[{".includes(token)) depth++;
    before = token;
  }
  return { text: shown, isValid: true };
}
