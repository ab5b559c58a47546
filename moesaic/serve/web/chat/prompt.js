// A conversation as the API takes it: the messages of one branch, what was left out of them, and attached files.

// A file within a message. The fence is longer than any in the file, so that nothing in it can end it.
export function withAttachments({ content, attachments = [] }) {
  const files = attachments.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `Attached file: ${name}\n${fence}\n${text}\n${fence}`;
  });
  return [...files, content].filter(Boolean).join("\n\n");
}

// The part of a branch that is sent: from the cut on, if there is one on it.
export function sentPart(path, cut) {
  const from = cut ? path.findIndex((one) => one.id === cut) : -1;
  return from > 0 ? path.slice(from) : path;
}

export function promptMessages(path, { system = "", cut = null, summary = null } = {}) {
  const sent = sentPart(path, cut);
  const shortened = sent.length < path.length;
  const preface = [system.trim(), shortened && summary ? `Summary of the conversation before this point:\n${summary}` : ""];
  const turns = [];
  const called = new Set();
  for (const message of sent) {
    if (message.role === "user") turns.push({ role: "user", content: withAttachments(message) });
    else if (message.role === "tool") called.has(message.call) && turns.push({ role: "tool", tool_call_id: message.call, content: message.content });
    else if (message.calls?.length) {
      for (const { id } of message.calls) called.add(id); // a result without its call would be refused
      turns.push({ role: "assistant", content: message.content, tool_calls: toolCalls(message.calls) });
    } else if (message.content) turns.push({ role: "assistant", content: message.content }); // not those that failed at once
  }
  const text = preface.filter(Boolean).join("\n\n");
  return text ? [{ role: "system", content: text }, ...turns] : turns;
}

function toolCalls(calls) {
  return calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
}
