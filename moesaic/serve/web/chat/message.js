// One message on the page: its text, the reasoning before it, tool calls, its versions, and what can be done with it.

import { element, iconButton, ICONS } from "../element.js";
import { copyText } from "../page/clipboard.js";
import { render } from "../text/markdown.js";
import { callCards } from "../tools/calls.js";
import { editForm } from "./edit.js";
import { sourceList } from "./sources.js";

const LONG = 2000; // characters of a message of the user

export class MessageView {
  // `host` has the session, the toolbox, and act(action, view, extra), which does what the user chose.
  constructor(message, session, host) {
    Object.assign(this, { message, session, host });
    this.drawn = false;
    this.mine = message.role === "user";
    this.body = element("div", { class: this.mine ? "body user-text" : "body", tabindex: this.mine ? null : "0" });
    this.notes = element("div", { class: "notes" });
    this.extras = element("div", { class: "extras" });
    this.facts = element("p", { class: "facts" });
    this.versions = element("div", { class: "versions", role: "group", "aria-label": "Versions" });
    this.actions = element("div", { class: "actions" }, this.versions, ...this.buttons());
    if (!this.mine) this.actions.append(this.facts);
    const name = element("h2", { class: "unseen" }, this.mine ? "You" : "Assistant");
    this.root = element("li", { class: `message ${this.mine ? "mine" : "theirs"}`, tabindex: "-1" }, name, this.notes, this.body, this.extras, this.actions);
    this.root.view = this;
    this.draw();
  }

  get tokens() {
    return this.session.tokensOf(this.message);
  }

  get writing() {
    return this.session.running?.message === this.message;
  }

  buttons() {
    const act = (action) => () => this.host.act(action, this);
    const copy = iconButton("Copy", ICONS.copy, () => copyText(this.message.content, copy));
    const edit = iconButton("Edit", ICONS.edit, () => this.edit());
    const remove = iconButton("Delete", ICONS.remove, act("remove"));
    if (this.mine) return [edit, copy, remove];
    this.onward = iconButton("Continue", ICONS.onward, act("continue"));
    return [copy, iconButton("Regenerate", ICONS.again, act("again")), iconButton("Regenerate side by side", ICONS.beside, act("beside")), this.onward, edit, remove];
  }

  // Soon: many chunks may come before the next frame.
  drawSoon() {
    if (this.drawn) return;
    this.drawn = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.drawn = false;
    const { content, reasoning, calls } = this.message;
    this.root.classList.toggle("writing", this.writing);
    this.drawVersions();
    if (this.mine) {
      this.body.textContent = content;
      this.body.hidden = !content;
      if (content.length > LONG) this.body.tabIndex = 0; // it scrolls
      this.drawAttachments();
      return;
    }
    const offset = this.tokens.offset(content);
    if (offset !== this.offset) render(this.body, ""); // its words belong to other tokens now
    this.offset = offset;
    render(this.body, content, (block) => this.tokens.wrap(block, offset));
    this.drawReasoning(reasoning);
    this.drawExtras(calls);
    this.body.hidden = !content && !this.writing;
    this.onward.hidden = this.writing || !content || Boolean(calls?.length);
    this.facts.textContent = this.message.facts ?? "";
  }

  drawVersions() {
    const all = this.session.tree.siblings(this.message);
    const place = all.indexOf(this.message);
    this.versions.hidden = all.length < 2;
    const mark = all.map((one) => one.id).join();
    if (all.length < 2 || this.versionsMark === mark) return; // buttons that have the focus keep it
    this.versionsMark = mark;
    const go = (label, icon, to) => {
      const made = iconButton(label, icon, () => this.host.act("version", this, to));
      made.disabled = !to;
      return made;
    };
    this.versions.replaceChildren(
      go("Previous version", ICONS.previous, all[place - 1]),
      element("span", { class: "place", "aria-label": `Version ${place + 1} of ${all.length}` }, `${place + 1}/${all.length}`),
      go("Next version", ICONS.next, all[place + 1]),
    );
  }

  drawAttachments() {
    if (this.extras.childElementCount || !this.message.attachments) return;
    const made = this.message.attachments.map(({ name, text }) =>
      element("details", { class: "attachment" }, element("summary", {}, name), element("pre", { tabindex: "0", "aria-label": name }, text)),
    );
    this.extras.append(...made);
  }

  drawExtras(calls) {
    const { error, ignored } = this.message;
    const parts = [];
    if (calls?.length) parts.push(callCards(calls, this.session.resultsOf(this.message), this.host.toolbox, (decision, call) => this.host.act("decide", this, { decision, call })));
    const sources = this.writing ? null : sourceList(this.message);
    if (sources) parts.push(sources);
    if (error) parts.push(element("p", { class: "error", role: "alert" }, error));
    if (ignored) parts.push(element("p", { class: "hint" }, `The server did not use: ${ignored}`));
    const mark = JSON.stringify([calls, error, ignored, Boolean(sources), [...this.session.resultsOf(this.message).keys()], this.host.toolbox.tools.size]);
    if (mark === this.mark) return; // buttons that have the focus keep it
    this.mark = mark;
    this.extras.replaceChildren(...parts);
  }

  drawReasoning(text) {
    if (!text) {
      this.notes.replaceChildren();
      return;
    }
    if (!this.notes.firstChild) {
      this.notes.append(element("details", { class: "reasoning" }, element("summary", {}), element("div", { class: "reasoning-text" })));
    }
    const [details] = this.notes.children;
    details.firstChild.textContent = this.writing && !this.message.content ? "Reasoning…" : "Reasoning";
    render(details.lastChild, text);
  }

  edit() {
    if (this.root.classList.contains("editing")) return;
    this.root.classList.add("editing");
    const form = editForm(this.message.content, this.mine ? "Send" : "Save", (text) => {
      this.root.classList.remove("editing");
      if (text !== null && text !== this.message.content) this.host.act("edit", this, text);
    });
    this.body.after(form);
    form.begin();
  }
}
