// The conversation: an array of messages, kept in this browser.
//
// A message is { role, content, reasoning?, calls?, tokens?, facts?, error? }; `tokens` as in tokens.js.

import { recall, remember } from "./storage.js";

const TOKENS_KEPT = 4; // responses whose tokens are stored: they take far more space than the text

export class Conversation {
  constructor() {
    const stored = recall("conversation", []);
    this.messages = Array.isArray(stored) ? stored.filter((one) => typeof one?.content === "string") : [];
  }

  save() {
    const responses = this.messages.filter((one) => one.tokens);
    const kept = new Set(responses.slice(-TOKENS_KEPT));
    const stored = this.messages.map((one) => (kept.has(one) ? one : { ...one, tokens: undefined }));
    remember("conversation", stored) || remember("conversation", stored.map((one) => ({ ...one, tokens: undefined })));
  }

  add(message) {
    this.messages.push(message);
    this.save();
    return message;
  }

  // Remove a message and all that follow.
  cut(message) {
    const place = this.messages.indexOf(message);
    if (place >= 0) this.messages.length = place;
    this.save();
  }

  clear() {
    this.messages.length = 0;
    this.save();
  }

  // As the API takes it, without responses that failed before their first token.
  forModel(system) {
    const sent = this.messages.filter((one) => one.content || one.role === "user");
    const turns = sent.map(({ role, content }) => ({ role, content }));
    return system.trim() ? [{ role: "system", content: system }, ...turns] : turns;
  }
}
