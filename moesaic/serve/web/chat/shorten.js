// Ways on when a conversation outgrows the context: leave the oldest turns out, or put a summary in their place.

import { promptMessages, sentPart, withAttachments } from "./prompt.js";

const ROOM = 0.6; // of the context that may be taken afterwards: the conversation is to go on
const SUMMARY_TOKENS = 300;
const ASK = "Summarise the conversation below in a few sentences for someone who has to continue it. Keep names, numbers, decisions and open questions. Write only the summary.";

// The first message to be sent from now on, so that the prompt takes no more than some tokens; null if there is none to
// leave out.
export async function cutPoint(session, meter, draft = [], room = ROOM) {
  const { path, record } = session;
  const current = sentPart(path, record.cut)[0];
  const candidates = path.filter((one) => one.role === "user" && path.indexOf(one) > path.indexOf(current));
  let [low, high] = [0, candidates.length - 1];
  if (high < 0) return null;
  while (low < high) {
    const middle = (low + high) >> 1;
    const messages = promptMessages(path, { ...record, system: session.system, cut: candidates[middle].id });
    const used = await meter.count([...messages, ...draft]);
    if (used === null || used <= room * meter.limit) high = middle;
    else low = middle + 1;
  }
  return candidates[low];
}

export async function leaveOutOldest(session, meter, draft) {
  const cut = await cutPoint(session, meter, draft);
  if (cut) await session.update({ cut: cut.id, summary: null });
  return Boolean(cut);
}

// Long ones are summarised piece by piece, each with the summary so far.
export async function summariseOldest(session, meter, api, draft, signal) {
  const cut = await cutPoint(session, meter, draft, ROOM / 2);
  if (!cut) return false;
  const { path, record } = session;
  const older = path.slice(0, path.indexOf(cut));
  const already = record.cut ? older.findIndex((one) => one.id === record.cut) : 0;
  let summary = record.cut && record.summary ? record.summary : "";
  for (const piece of await pieces(older.slice(Math.max(0, already)), meter)) {
    const content = `${ASK}\n\n${summary ? `Summary so far:\n${summary}\n\n` : ""}Conversation:\n${piece}`;
    const body = { model: meter.models.current?.id, messages: [{ role: "user", content }], max_tokens: SUMMARY_TOKENS, temperature: 0.2 };
    const { choices } = await api.post("/v1/chat/completions", body, signal);
    summary = choices[0].message.content?.trim() || summary;
  }
  await session.update({ cut: cut.id, summary });
  return true;
}

// The transcript in parts that leave room for the summary.
async function pieces(messages, meter) {
  const lines = messages.filter((one) => one.content).map((one) => `${one.role}: ${withAttachments(one)}`);
  const text = lines.join("\n\n");
  const tokens = (await meter.countText(text)) ?? text.length / 3;
  const room = Math.max(64, (meter.limit ?? 4096) - 2 * SUMMARY_TOKENS - 100);
  const size = Math.max(200, Math.floor(Math.min(1, (0.9 * room) / tokens) * text.length));
  const parts = [];
  for (let from = 0; from < text.length; from += size) parts.push(text.slice(from, from + size));
  return parts;
}
