// Conversations as Markdown that can be read again: what is shown of them, without settings and other versions. A line of
// a message that reads like one of the file's own gets a backslash in front, which is left out again.

import { fenced } from "./request.js";

const OWN = "(?=## (?:You|Weft|Result)$|\\*Attached: |Call of `|# .*\\s*(?![^]))"; // the last: before "## You" it were a title
const [ESCAPED, PLAIN] = [new RegExp(`^\\\\(\\\\*)${OWN}`, "gm"), new RegExp(`^(\\\\*)${OWN}`, "gm")];
const CHAT = /^# (.*)\n(?=\n## (?:You|Weft)$)/gm;
const PART = /^## (You|Weft|Result)$/gm;
const BLOCK = /^(?:\*Attached: (.*)\*|Call of `(.*)`:)\n\n(?:!\[\]\((data:.*)\)|(`{3,}).*\n([^]*?)\n\4)$/gm;
const NAMES = { user: "You", assistant: "Weft", tool: "Result" };

const escape = (text) => text.replace(PLAIN, "\\$1");
const unescape = (text) => text.replace(ESCAPED, "$1");

/** The messages that are shown, as Markdown. */
export function writeMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  for (const { role, content, calls, files } of conversation.path()) {
    parts.push(`## ${NAMES[role]}`);
    for (const { name, text, url } of files ?? []) parts.push(`*Attached: ${name}*`, url ? `![](${url})` : fenced(escape(text)));
    if (content) parts.push(escape(content));
    for (const call of calls ?? []) parts.push(`Call of \`${call.name}\`:`, fenced(escape(call.arguments), "json"));
  }
  return `${parts.join("\n\n")}\n`;
}

/** The texts between lines that match, each behind what its line holds. @returns {[string, string][]} */
function split(text, lines) {
  const pieces = text.split(lines).slice(1);
  return pieces.flatMap((name, index) => (index % 2 ? [] : [[name, pieces[index + 1]]]));
}

/** @returns {object[]} the conversations of a file, each with its messages as a list */
export function readMarkdown(text) {
  return split(text.replace(/\r\n?/g, "\n"), CHAT).map(([title, body]) => {
    let open = []; // calls without a result
    const messages = split(body, PART).map(([name, part], index) => {
      const role = Object.keys(NAMES).find((key) => NAMES[key] === name);
      const message = readPart(role, part, index);
      if (role === "tool") return { ...message, call_id: open.shift()?.id ?? "" };
      open = [...message.calls];
      return message;
    });
    return { title, titled: 1, time: Date.now(), messages };
  });
}

function readPart(role, text, index) {
  const [files, calls] = [[], []];
  const content = text.replace(BLOCK, (_, file, name, url, fence, inner = "") => {
    if (file === undefined) calls.push({ id: `call_${index}_${calls.length}`, name, arguments: unescape(inner) });
    else files.push(url ? { name: file, url } : { name: file, text: unescape(inner) });
    return "";
  });
  return { role, content: unescape(content.replace(/^\n+|\n+$/g, "")), calls, ...(files.length && { files }) };
}
