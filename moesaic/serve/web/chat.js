// The conversation on the page: send, stream, stop, regenerate, edit.

import { MessageView, copyText, fit } from "./message.js";
import { Announcer } from "./announcer.js";
import { showTokenCards } from "./tokens.js";

const byId = (id) => document.getElementById(id);

export class Chat {
  constructor(api, settings, conversation) {
    Object.assign(this, { api, settings, conversation });
    this.model = null;
    this.running = null; // { stop, ended } of the response that is being generated
    this.list = byId("messages");
    this.scroll = byId("scroll");
    this.box = byId("prompt");
    this.announcer = new Announcer(byId("announcer"));
    for (const message of conversation.messages) this.show(message);
    this.listen();
    this.changed();
    this.toEnd();
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.send(this.box.value);
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.send(this.box.value);
    });
    this.box.addEventListener("input", () => fit(this.box));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.stop();
      // Typing with nothing chosen means to write.
      const typing = event.key.length === 1 && !event.ctrlKey && !event.metaKey && !event.altKey;
      if (typing && document.activeElement === document.body) this.box.focus();
    });
    byId("new-chat").addEventListener("click", () => this.startOver());
    byId("ideas").addEventListener("click", (event) => {
      if (event.target.matches("button")) this.send(event.target.textContent);
    });
    this.list.addEventListener("click", (event) => {
      const button = event.target.closest(".copy-code");
      if (button) copyText(button.closest("figure").querySelector("code").textContent, button);
    });
    this.scroll.addEventListener("scroll", () => this.noteScroll());
    byId("latest").addEventListener("click", () => this.toEnd());
    showTokenCards(this.list, byId("card"), (span) => span.closest(".message")?.view.tokens);
  }

  show(message) {
    const view = new MessageView(message, (action, from, text) => this.act(action, from, text));
    this.list.append(view.root);
    return view;
  }

  async act(action, view, text) {
    await this.stop();
    // What follows depends on it.
    this.conversation.cut(view.message);
    while (view.root.nextSibling) view.root.nextSibling.remove();
    view.root.remove();
    if (action === "edit") this.send(text);
    else this.respond();
  }

  send(text) {
    if (!text.trim() || this.running) return;
    this.box.value = "";
    fit(this.box);
    this.show(this.conversation.add({ role: "user", content: text.trim() }));
    this.box.focus({ preventScroll: true });
    this.respond();
  }

  // Ends the response that is being generated, which keeps what it has; resolves when it is over.
  stop() {
    this.running?.stop.abort();
    return this.running?.ended;
  }

  async startOver() {
    await this.stop();
    this.conversation.clear();
    this.list.replaceChildren();
    this.changed();
    this.box.focus();
  }

  respond() {
    const messages = this.conversation.forModel(this.settings.values.system);
    const view = this.show(this.conversation.add({ role: "assistant", content: "" }));
    const stop = new AbortController();
    this.running = { stop, ended: null };
    view.writing = true;
    view.draw();
    this.changed();
    this.toEnd();
    this.running.ended = this.generate(view, messages, stop.signal).finally(() => {
      this.running = null;
      view.writing = false;
      if (view.tokens.list.length) view.message.tokens = view.tokens.list;
      this.announcer.finish();
      view.draw();
      this.follow();
      this.conversation.save();
      this.changed();
    });
  }

  async generate(view, messages, signal) {
    const { message } = view;
    const times = { sent: performance.now(), first: null, last: null, tokens: 0 };
    let reason = null;
    try {
      const body = { ...this.settings.forRequest(), model: this.model, messages, stream: true, stream_options: { include_usage: true } };
      const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
      for await (const chunk of this.api.events("/v1/chat/completions", options)) {
        if (chunk.error) throw new Error(chunk.error.message);
        if (chunk.usage) times.tokens = chunk.usage.completion_tokens;
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        this.take(view, choice, times);
        reason = choice.finish_reason ?? reason;
      }
      if (!reason) throw new Error("The connection closed before the response was complete.");
    } catch (error) {
      if (signal.aborted) reason = "abort";
      else message.error = error instanceof TypeError ? "The server cannot be reached." : error.message;
    }
    message.facts = facts(times, reason);
  }

  take(view, { delta = {}, logprobs }, times) {
    const { message, tokens } = view;
    for (const token of logprobs?.content ?? []) tokens.add(token);
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      times.last = performance.now();
      times.first ??= times.last;
    }
    if (delta.content) {
      message.content += delta.content;
      this.announcer.push(delta.content);
    }
    if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
    for (const { index, function: part } of delta.tool_calls ?? []) {
      message.calls ??= [];
      const call = (message.calls[index] ??= { name: "", arguments: "" });
      call.name += part.name ?? "";
      call.arguments += part.arguments ?? "";
    }
    times.tokens = Math.max(times.tokens, tokens.list.length);
    view.drawSoon();
    requestAnimationFrame(() => this.follow());
  }

  changed() {
    const running = Boolean(this.running);
    document.body.classList.toggle("answering", running);
    byId("send-label").textContent = running ? "Stop" : "Send";
    byId("send").title = running ? "Stop (Esc)" : "Send (Enter)";
    byId("welcome").hidden = this.conversation.messages.length > 0;
    this.noteScroll();
  }

  // Stay at the end while a response grows, unless the reader has scrolled away from it.
  follow() {
    if (this.atEnd) this.toEnd();
  }

  toEnd() {
    this.scroll.scrollTop = this.scroll.scrollHeight;
    this.noteScroll();
  }

  noteScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroll;
    this.atEnd = scrollHeight - scrollTop - clientHeight < 80;
    byId("latest").hidden = this.atEnd;
  }
}

function facts({ sent, first, last, tokens }, reason) {
  const parts = [];
  if (tokens) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (first !== null) {
    const throughput = ((tokens - 1) * 1000) / (last - first);
    if (tokens > 1 && last > first) parts.push(`${throughput.toFixed(throughput < 100 ? 1 : 0)} tokens/s`);
    parts.push(`first token after ${((first - sent) / 1000).toFixed(2)} s`);
  }
  if (reason === "abort") parts.push("stopped");
  if (reason === "length") parts.push("max tokens reached");
  return parts.join(" · ");
}
