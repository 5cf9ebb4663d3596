// Merges the versions of a conversation from several tabs. A turn is a user's message and everything up to the next one.
// No turn is dropped; of two versions of a turn, or of the title, the later one wins.

/** @returns {Map<string, import("./store.js").Message[]>} the turns by name, in order */
function turnsOf(messages) {
  const turns = new Map();
  let turn = [];
  for (const message of messages) {
    if (message.role === "user" || !turns.size) turns.set(message.turn, (turn = []));
    turn.push(message);
  }
  return turns;
}

const changed = (turn) => Math.max(...turn.map((message) => message.changed ?? 0));
const isNewer = (turn, other) => !other || changed(turn) > changed(other);

/** Name turns that an older version of the page has stored without a name, equally in every tab. */
export function nameTurns(messages) {
  messages.filter((message) => message.role === "user").forEach((message, index) => (message.turn ??= `${index}`));
}

/**
 * @param {import("./store.js").Conversation} mine
 * @param {import("./store.js").Conversation | null} stored null if it is not stored
 * @returns {{merged: Conversation, isAhead: boolean}} isAhead: mine has something that is not stored
 */
export function merge(mine, stored) {
  if (!stored) return { merged: mine, isAhead: true };
  const [ours, theirs] = [turnsOf(mine.messages), turnsOf(stored.messages)];
  const turns = new Map([...theirs, ...ours]); // theirs come first and keep their order
  for (const [name, turn] of theirs) if (isNewer(turn, ours.get(name))) turns.set(name, turn);
  const isRenamed = (mine.titled ?? 0) > (stored.titled ?? 0);
  const { title, titled } = isRenamed ? mine : stored;
  const merged = { ...mine, title, titled, time: Math.max(mine.time, stored.time), messages: [...turns.values()].flat() };
  return { merged, isAhead: isRenamed || [...ours].some(([name, turn]) => isNewer(turn, theirs.get(name))) };
}
