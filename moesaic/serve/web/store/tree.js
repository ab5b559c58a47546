// The messages of a conversation as a tree. Every message names the one it follows, so an edited or regenerated message is
// a branch beside the old one, and what two tabs add to a conversation at the same time is two branches, not a conflict.
//
// A deleted message leaves its place without its content: what followed it then follows the one before it.

export class Tree {
  constructor(messages = []) {
    this.messages = new Map(messages.map((message) => [message.id, message]));
  }

  get(id) {
    const found = this.messages.get(id);
    return found && !found.deleted ? found : null;
  }

  put(message) {
    this.messages.set(message.id, message);
  }

  // A message as another tab has stored it. The object stays the same, for whoever holds it.
  merge(message) {
    const known = this.messages.get(message.id);
    if (!known || known.deleted !== message.deleted) this.put(message);
    else Object.assign(known, message);
  }

  // The message that one follows, past deleted ones; null for a first one.
  before(message) {
    let found = this.messages.get(message.parent);
    for (let steps = 0; found?.deleted && steps < this.messages.size; steps++) found = this.messages.get(found.parent);
    return found && !found.deleted ? found : null;
  }

  // What follows a message (null: what a conversation begins with), oldest first.
  after(message) {
    const found = [...this.messages.values()].filter((one) => !one.deleted && this.before(one) === message);
    return found.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
  }

  siblings(message) {
    return this.after(this.before(message));
  }

  // The end of the newest branch below a message (null: of all).
  end(message = null) {
    const seen = new Set();
    for (let at = message; ; at = this.after(at).at(-1)) {
      const next = this.after(at).at(-1);
      if (!next || seen.has(next.id)) return at;
      seen.add(next.id);
    }
  }

  // From the first message to this one.
  path(leaf) {
    const found = [];
    for (let at = leaf; at && found.length <= this.messages.size; at = this.before(at)) found.unshift(at);
    return found;
  }
}
