// The conversations kept in this browser, and word from other tabs that change them.
//
// Tabs never overwrite each other: a message is a record of its own, written by the tab that made it, and a change to a
// conversation is read and written within one transaction, field by field.

import { recall } from "./preferences.js";

export const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

let lastTime = 0;
// Later than any before in this tab, so that what is made in one millisecond has an order.
export const now = () => (lastTime = Math.max(Date.now(), lastTime + 0.001));

export class Library extends EventTarget {
  // `opening` is a database, or the promise of one: the page need not wait for it.
  constructor(opening) {
    super();
    this.opening = opening;
    this.channel = new BroadcastChannel("moesaic");
    this.channel.addEventListener("message", ({ data }) => this.tell(data.kind, data.id, true));
  }

  // Storage may be full, or taken away. The page goes on without, and says so ("unstored").
  async change(work) {
    try {
      return await (await this.opening).change(work);
    } catch (error) {
      this.dispatchEvent(new CustomEvent("unstored", { detail: { error } }));
      return null;
    }
  }

  // Word to this tab's page, and to the others: "changed" or "removed".
  tell(kind, id, elsewhere = false) {
    this.dispatchEvent(new CustomEvent(kind, { detail: { id, elsewhere } }));
    if (!elsewhere) this.channel.postMessage({ kind, id });
  }

  async list() {
    return (await (await this.opening).all("conversations")).sort((a, b) => b.updated - a.updated);
  }

  async load(id) {
    const database = await this.opening;
    const [record, messages, tokens] = await Promise.all([
      database.get("conversations", id),
      database.of("messages", id),
      database.of("tokens", id),
    ]);
    return record ? { record, messages, tokens } : null;
  }

  async create(fields = {}) {
    const record = { id: newId(), title: "", created: now(), updated: now(), ...fields };
    await this.change(({ put }) => put("conversations", record));
    this.tell("changed", record.id);
    return record;
  }

  // Some fields of a conversation; the others stay as they are by then. False if it is gone.
  async update(id, fields) {
    const record = await this.change(async ({ get, put }) => {
      const old = await get("conversations", id);
      if (old) await put("conversations", { ...old, ...fields });
      return old;
    });
    if (record) this.tell("changed", id);
    return Boolean(record);
  }

  // A message and the probabilities of its tokens, unless its conversation was deleted meanwhile.
  async keep(message, tokens = null, fields = {}) {
    const stored = await this.change(async ({ get, put }) => {
      const record = await get("conversations", message.conversation);
      if (!record) return false;
      await put("messages", message);
      if (tokens?.length) await put("tokens", { id: message.id, conversation: message.conversation, list: tokens });
      await put("conversations", { ...record, ...fields, updated: now() });
      return true;
    });
    if (stored) this.tell("changed", message.conversation);
    return stored;
  }

  // Resolves to all of it, for `restore`.
  async remove(id) {
    const all = await this.change(async ({ get, of, remove }) => {
      const record = await get("conversations", id);
      if (!record) return null;
      const [messages, tokens] = [await of("messages", id), await of("tokens", id)];
      await remove("conversations", id);
      for (const one of messages) await remove("messages", one.id);
      for (const one of tokens) await remove("tokens", one.id);
      return { record, messages, tokens };
    });
    if (all) this.tell("removed", id);
    return all;
  }

  async restore({ record, messages, tokens = [] }) {
    await this.change(async ({ put }) => {
      await put("conversations", record);
      for (const one of messages) await put("messages", one);
      for (const one of tokens) await put("tokens", one);
    });
    this.tell("changed", record.id);
  }

  // The ids of conversations that hold all of the words, in their title or in a message.
  async search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const left = new Map((await this.list()).map(({ id, title }) => [id, new Set(words.filter((word) => !title.toLowerCase().includes(word)))]));
    for (const { conversation, content = "" } of await (await this.opening).all("messages")) {
      const missing = left.get(conversation);
      if (!missing?.size) continue;
      const held = content.toLowerCase();
      for (const word of missing) if (held.includes(word)) missing.delete(word);
    }
    return new Set([...left].filter(([, missing]) => !missing.size).map(([id]) => id));
  }

  // Probabilities take far more space than texts: only those of the newest conversations stay.
  async prune(newest = 40) {
    const old = (await this.list()).slice(newest);
    for (const { id } of old) {
      await this.change(async ({ of, remove }) => {
        for (const one of await of("tokens", id)) await remove("tokens", one.id);
      });
    }
  }

  // The one conversation that earlier versions of this page kept elsewhere.
  async adoptOld() {
    const old = recall("conversation", null);
    localStorage.removeItem("moesaic.conversation");
    if (!Array.isArray(old) || !old.length) return;
    const record = { id: newId(), title: String(old[0]?.content ?? "").slice(0, 60), created: now(), updated: now() };
    let parent = null;
    const messages = [];
    for (const { role, content } of old) {
      if (typeof content !== "string") continue;
      messages.push({ id: newId(), conversation: record.id, parent, role, content, created: now() });
      parent = messages.at(-1).id;
    }
    await this.restore({ record, messages });
  }
}
