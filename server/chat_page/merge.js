// What several tabs made of one conversation -> one conversation. A turn is a message of the user and all that follows up
// to the next one. Turns are never dropped; of one turn, what was written last counts, and so it is with the title.

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

/** Give turns that an older page has stored a name: the same one in every tab. */
export function nameTurns(messages) {
  messages.filter((message) => message.role === "user").forEach((message, index) => (message.turn ??= `${index}`));
}

/**
 * @param {import("./store.js").Conversation} mine
 * @param {import("./store.js").Conversation | null} stored null if it is not
 * @returns {{merged: Conversation, isAhead: boolean}} isAhead: something of mine is not stored
 */
export function merge(mine, stored) {
  if (!stored) return { merged: mine, isAhead: true };
  const [ours, theirs] = [turnsOf(mine.messages), turnsOf(stored.messages)];
  const turns = new Map([...theirs, ...ours]); // theirs come first, and stay where they are
  for (const [name, turn] of theirs) if (isNewer(turn, ours.get(name))) turns.set(name, turn);
  const isRenamed = (mine.titled ?? 0) > (stored.titled ?? 0);
  const { title, titled } = isRenamed ? mine : stored;
  const merged = { ...mine, title, titled, time: Math.max(mine.time, stored.time), messages: [...turns.values()].flat() };
  return { merged, isAhead: isRenamed || [...ours].some(([name, turn]) => isNewer(turn, theirs.get(name))) };
}
