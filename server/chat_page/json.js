// Adds line breaks and indentation to JSON. The tokens stay as they are: written again from parsed values, a long number
// would lose digits, and a repeated name its first value.

const TOKEN = /"[^"\\]*(?:\\.[^"\\]*)*"|[{}[\],:]|[^\s{}[\],:"]+/g;
const MAX_INDENT = 40; // levels; keeps the work linear in the text

/**
 * @param {string} text
 * @returns {{text: string, isValid: boolean}} the text unchanged if it is not JSON
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
