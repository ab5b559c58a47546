// Conversations as a file: export, and import of what was exported here (or a plain list of messages as the API takes it).

import { citation, source } from "../chat/sources.js";
import { newId, now } from "./library.js";

const FORMAT = "moesaic-conversations";
const ROLES = new Set(["user", "assistant", "tool", "system"]);
const TEXTS = ["title", "system", "model"];

export async function exported(library, ids = null) {
  const conversations = [];
  for (const { id } of await library.list()) {
    if (ids && !ids.includes(id)) continue;
    const { record, messages } = await library.load(id);
    conversations.push({ ...record, messages: withoutDeleted(messages) });
  }
  return { format: FORMAT, version: 1, exported: new Date().toISOString(), conversations };
}

// What followed a deleted message follows the one before it.
function withoutDeleted(messages) {
  const byId = new Map(messages.map((one) => [one.id, one]));
  const before = (one) => {
    let parent = byId.get(one.parent);
    while (parent?.deleted) parent = byId.get(parent.parent);
    return parent?.id ?? null;
  };
  return messages.filter((one) => !one.deleted).map((one) => ({ ...one, parent: before(one), conversation: undefined }));
}

export function download(content, name) {
  const address = URL.createObjectURL(new Blob([JSON.stringify(content, null, 1)], { type: "application/json" }));
  const link = Object.assign(document.createElement("a"), { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// Adds what a file holds, as new conversations, whatever is here already. Resolves to their ids.
export async function imported(library, text) {
  let content;
  try {
    content = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  const given = Array.isArray(content) ? [{ messages: content }] : content?.messages ? [content] : content?.conversations;
  if (!Array.isArray(given) || !given.length) throw new Error("The file holds no conversations.");
  const read = given.map(conversation);
  for (const one of read) await library.restore(one);
  return read.map((one) => one.record.id);
}

function conversation(given, number) {
  if (!Array.isArray(given?.messages)) throw new Error(`Conversation ${number + 1} of the file has no messages.`);
  const record = { id: newId(), title: "", created: time(given.created), updated: time(given.updated) };
  for (const name of TEXTS) if (typeof given[name] === "string") record[name] = given[name];
  const ids = new Map(given.messages.map((one) => [one?.id, newId()]));
  const tree = given.messages.every((one) => typeof one?.id === "string") && ids.size === given.messages.length;
  let previous = null;
  const messages = [];
  given.messages.forEach((one, place) => {
    if (!ROLES.has(one?.role)) throw new Error(`Message ${place + 1} of conversation ${number + 1} has no role that is known.`);
    if (one.role === "system" && !tree) {
      record.system = String(one.content ?? "");
      return;
    }
    const id = tree ? ids.get(one.id) : newId();
    const made = { id, conversation: record.id, parent: tree ? (ids.get(one.parent) ?? null) : previous, role: one.role, content: words(one.content), created: time(one.created) };
    if (typeof one.reasoning === "string") made.reasoning = one.reasoning;
    if (typeof one.facts === "string") made.facts = one.facts;
    if (typeof one.call === "string") made.call = one.call;
    if (Array.isArray(one.sources)) made.sources = one.sources.map((each) => source(each ?? {}));
    if (Array.isArray(one.citations)) made.citations = one.citations.map((each) => citation(each ?? {}));
    if (Array.isArray(one.attachments)) made.attachments = one.attachments.map(({ name, text }) => ({ name: String(name), text: String(text) }));
    if (Array.isArray(one.calls)) made.calls = one.calls.map(({ id: call, name, arguments: given }) => ({ id: String(call), name: String(name), arguments: String(given) }));
    messages.push(made);
    previous = id;
  });
  record.title ||= messages.find((one) => one.role === "user")?.content.slice(0, 60) ?? "Imported";
  if (typeof given.leaf === "string" && ids.has(given.leaf)) record.leaf = ids.get(given.leaf);
  if (typeof given.cut === "string" && ids.has(given.cut)) record.cut = ids.get(given.cut);
  if (typeof given.summary === "string" && record.cut) record.summary = given.summary;
  return { record, messages };
}

const time = (given) => (Number.isFinite(given) ? given : now());

// A message's content is a text, or a list of parts of which only texts are taken.
function words(content) {
  if (typeof content === "string") return content;
  return Array.isArray(content) ? content.map((part) => (typeof part?.text === "string" ? part.text : "")).join("") : "";
}
