// A conversation that is open in this tab: its branch, what is generated for it, and everything that changes it. The page
// draws it; a response goes on while another conversation is shown.

import { newId, now } from "../store/library.js";
import { Tree } from "../store/tree.js";
import { Tokens } from "../text/tokens.js";
import { Generation } from "./generation.js";
import { promptMessages } from "./prompt.js";

const SAVE_SECONDS = 2; // while a response grows

export class Session extends EventTarget {
  // `context` holds what all sessions share: api, library, toolbox, and request(), the settings of a request.
  constructor(context, loaded = null) {
    super();
    this.context = context;
    this.record = loaded?.record ?? { title: "" }; // has an id once something was said
    this.tree = new Tree(loaded?.messages);
    this.tokens = new Map((loaded?.tokens ?? []).map(({ id, list }) => [id, new Tokens(list)]));
    this.leaf = this.tree.get(this.record.leaf) ?? this.tree.end();
    this.running = null; // { message, generation, ended }
    this.stale = false; // another tab has changed it meanwhile
  }

  // "drawn": other messages are shown; "grown": one has more to show; "running": a response begins or ends.
  tell(kind, detail = {}) {
    this.dispatchEvent(new CustomEvent(kind, { detail }));
  }

  get id() {
    return this.record.id ?? null;
  }

  get path() {
    return this.tree.path(this.leaf);
  }

  get system() {
    return this.record.system ?? this.context.system();
  }

  prompt(path = this.path) {
    return promptMessages(path, { ...this.record, system: this.system });
  }

  tokensOf(message) {
    if (!this.tokens.has(message.id)) this.tokens.set(message.id, new Tokens());
    return this.tokens.get(message.id);
  }

  // Read again what another tab has added; what is being written here is not touched.
  async refresh() {
    const loaded = this.id && (await this.context.library.load(this.id));
    if (!loaded) return;
    this.stale = Boolean(this.running);
    if (this.stale) return;
    Object.assign(this.record, loaded.record);
    for (const message of loaded.messages) this.tree.merge(message);
    for (const { id, list } of loaded.tokens) if (!this.tokens.get(id)?.list.length) this.tokens.set(id, new Tokens(list));
    this.leaf = (this.leaf && this.tree.get(this.leaf.id)) ?? this.tree.end();
    this.tell("drawn");
  }

  async update(fields) {
    Object.assign(this.record, fields);
    if (this.id) await this.context.library.update(this.id, fields);
  }

  async add(fields, parent = this.leaf) {
    if (!this.id) {
      const title = (fields.content || fields.attachments?.[0]?.name || "").trim().replace(/\s+/g, " ").slice(0, 60);
      this.record = await this.context.library.create({ ...this.record, title, system: this.system, model: this.context.model() });
    }
    const message = { id: newId(), conversation: this.id, parent: parent?.id ?? null, created: now(), ...fields };
    this.tree.put(message);
    this.leaf = message;
    await this.keep(message);
    return message;
  }

  keep(message) {
    const tokens = this.tokens.get(message.id)?.list;
    return this.context.library.keep(message, tokens, this.leaf ? { leaf: this.leaf.id } : {});
  }

  // Show another branch: that of this message.
  switchTo(message) {
    this.leaf = this.tree.end(message);
    this.update({ leaf: this.leaf.id });
    this.tell("drawn");
  }

  async send(content, attachments = []) {
    await this.add({ role: "user", content, ...(attachments.length ? { attachments } : {}) });
    this.tell("drawn");
    return this.respond();
  }

  // A message in other words, beside the old one; what the user said is then answered anew.
  async rewrite(message, content) {
    const { role, attachments } = message;
    await this.add({ role, content, ...(attachments ? { attachments } : {}), ...(role === "assistant" ? { facts: "edited" } : {}) }, this.tree.before(message));
    this.tell("drawn");
    return role === "user" ? this.respond() : null;
  }

  // Another answer beside this one.
  regenerate(message) {
    return this.respond(this.tree.before(message));
  }

  // Resolves to a function that brings the message back.
  async remove(message) {
    const { leaf } = this;
    const all = [message, ...(message.calls?.length ? this.resultsOf(message).values() : [])];
    for (const { id, conversation, parent, role, created } of all) {
      const gone = { id, conversation, parent, role, content: "", created, deleted: true };
      this.tree.put(gone);
      if (!this.tree.get(leaf.id)) this.leaf = this.tree.end(this.tree.before(message)); // another version, if there is one
      await this.keep(gone);
    }
    this.tell("drawn");
    return async () => {
      for (const one of all) {
        this.tree.put(one);
        await this.keep(one);
      }
      this.leaf = this.tree.get(leaf.id) ?? this.tree.end();
      await this.update({ leaf: this.leaf.id });
      this.tell("drawn");
    };
  }

  // Ends the response that is being generated, which keeps what it has; resolves when it is over.
  async stop() {
    this.running?.generation.stop();
    await this.running?.ended;
  }

  async respond(parent = this.leaf) {
    await this.stop();
    const messages = this.prompt(this.tree.path(parent));
    const message = await this.add({ role: "assistant", content: "" }, parent);
    this.tell("drawn");
    return this.generate(message, { messages });
  }

  // Go on with an answer where it ended.
  async resume(message) {
    await this.stop();
    this.leaf = message;
    const messages = this.prompt(this.tree.path(message));
    return this.generate(message, { messages, continue_final_message: true, add_generation_prompt: false });
  }

  async generate(message, body) {
    let saved = performance.now();
    const tokens = this.tokensOf(message);
    if (!body.continue_final_message) tokens.clear();
    const generation = new Generation(this.context.api, message, tokens, (text) => {
      this.tell("grown", { message, text });
      if (performance.now() - saved < SAVE_SECONDS * 1000) return;
      saved = performance.now();
      this.keep(message);
    });
    const work = async () => {
      await generation.run({ ...(await this.context.request(body.messages)), ...body });
      for (const call of message.calls ?? []) call.state = "waiting";
      await this.keep(message); // before it counts as ended: the page may be closed then
      this.running = null;
      this.tell("grown", { message, text: "" });
      this.tell("running", { message });
    };
    const ended = work();
    this.running = { message, generation, ended };
    this.tell("running", { message });
    await ended;
    if (this.stale) await this.refresh();
    for (const call of message.calls ?? []) if (this.context.toolbox.isTrusted(call.name)) await this.decide("allow", message, call);
  }

  resultsOf(message) {
    const shown = this.path.includes(message) ? this.path : this.tree.path(this.tree.end(message));
    const later = shown.slice(shown.indexOf(message) + 1);
    const until = later.findIndex((one) => one.role !== "tool");
    return new Map((until < 0 ? later : later.slice(0, until)).map((one) => [one.call, one]));
  }

  // The user's word on a call of a tool; with the last one's result, the model goes on.
  async decide(decision, message, call) {
    const { toolbox } = this.context;
    if (call.state !== "waiting" || this.running) return;
    if (decision === "trust") toolbox.trust(call.name);
    call.state = "running";
    this.tell("grown", { message, text: "" });
    const refused = decision === "refuse";
    const { text, failed } = refused ? { text: "The user refused this call.", failed: false } : await toolbox.run(call);
    call.state = "done";
    await this.keep(message);
    await this.add({ role: "tool", content: text, call: call.id, ...(refused ? { refused } : {}), ...(failed ? { failed } : {}) }, this.tree.end(message));
    this.tell("drawn");
    // Several may end at once: only one of them lets the model go on.
    if (this.resultsOf(message).size < message.calls.length || this.answered === message.id) return;
    this.answered = message.id;
    await this.respond();
  }
}
