// The list of conversations: open, search, rename, delete with undo, export and import.

import { element, iconButton, ICONS } from "../element.js";
import { download, exported, imported } from "../store/archive.js";
import { confirm } from "./confirm.js";
import { toast } from "./toast.js";

const DAY = 86_400_000;

export class ConversationList {
  constructor(root, library, chat) {
    Object.assign(this, { root, library, chat });
    this.list = root.querySelector(".conversations");
    this.box = root.querySelector("#search");
    this.note = root.querySelector(".list-note");
    this.box.addEventListener("input", () => this.draw());
    root.querySelector("#export-all").addEventListener("click", () => this.export(null, "conversations"));
    const file = root.querySelector("#import-file");
    root.querySelector("#import").addEventListener("click", () => file.click());
    file.addEventListener("change", () => this.import(file));
    for (const kind of ["changed", "removed"]) library.addEventListener(kind, () => this.drawSoon());
    for (const kind of ["opened", "running"]) chat.addEventListener(kind, () => this.drawSoon());
    this.list.addEventListener("keydown", (event) => this.walk(event));
    this.draw();
  }

  drawSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.draw(), 30);
  }

  async draw() {
    const number = (this.drawing = (this.drawing ?? 0) + 1);
    const text = this.box.value.trim();
    const all = await this.library.list();
    const found = text ? await this.library.search(text) : null;
    if (number !== this.drawing) return; // a newer one is on its way
    const shown = all.filter(({ id }) => !found || found.has(id));
    this.note.textContent = !all.length ? "No conversations yet." : text ? `${shown.length} found` : "";
    // As long as nothing in it has changed the list stays, or a click that falls on a new row would be lost.
    const mark = JSON.stringify(shown.map(({ id, title, updated }) => [id, title, period(updated), this.chat.open.has(id), id === this.chat.session.id]));
    if (mark === this.mark) return;
    this.mark = mark;
    const focused = document.activeElement?.closest?.(".conversation")?.dataset.id;
    const rows = [];
    let last = null;
    for (const record of shown) {
      const when = period(record.updated);
      if (when !== last) rows.push(element("li", { class: "period" }, element("h2", {}, (last = when))));
      rows.push(this.row(record));
    }
    this.list.replaceChildren(...rows);
    if (focused) this.list.querySelector(`[data-id="${focused}"] .open`)?.focus();
  }

  row(record) {
    const title = record.title || "Untitled";
    const open = element("button", { type: "button", class: "open", title }, title);
    if (record.id === this.chat.session.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => {
      this.chat.openId(record.id);
      this.root.dispatchEvent(new Event("chosen"));
    });
    const actions = element(
      "span",
      { class: "entry-actions" },
      iconButton(`Rename ${title}`, ICONS.edit, () => this.rename(record)),
      iconButton(`Export ${title}`, ICONS.save, () => this.export([record.id], title)),
      iconButton(`Delete ${title}`, ICONS.remove, () => this.remove(record)),
    );
    const busy = this.chat.open.has(record.id) ? element("span", { class: "busy", role: "img", "aria-label": "answering" }) : "";
    return element("li", { class: "conversation", "data-id": record.id }, open, busy, actions);
  }

  // Up and down through the list.
  walk(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const all = [...this.list.querySelectorAll(".open")];
    const next = all[all.indexOf(document.activeElement.closest(".conversation")?.querySelector(".open")) + step];
    event.preventDefault();
    (next ?? (step < 0 ? this.box : null))?.focus();
  }

  async rename(record) {
    const title = await confirm({ title: "Rename the conversation", yes: "Rename", field: { label: "Title", value: record.title } });
    if (!title) return;
    if (record.id === this.chat.session.id) this.chat.session.record.title = title;
    await this.library.update(record.id, { title });
  }

  async remove(record) {
    await this.chat.open.get(record.id)?.stop();
    const all = await this.library.remove(record.id);
    if (!all) return;
    const shown = record.id === this.chat.session.id;
    if (shown) this.chat.startNew();
    toast(`Deleted “${record.title || "Untitled"}”.`, async () => {
      await this.library.restore(all);
      if (shown) this.chat.openId(record.id);
    });
  }

  async export(ids, name) {
    const content = await exported(this.library, ids);
    if (!content.conversations.length) return toast("There are no conversations to export.");
    const plain = name.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 50) || "conversation";
    return download(content, `${plain}.json`);
  }

  async import(field) {
    const [file] = field.files;
    field.value = "";
    if (!file) return;
    try {
      const ids = await imported(this.library, await file.text());
      toast(`Imported ${ids.length} conversation${ids.length === 1 ? "" : "s"}.`);
      await this.chat.openId(ids[0]);
    } catch (error) {
      toast(`${file.name}: ${error.message}`);
    }
  }
}

function period(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  return time >= midnight - 6 * DAY ? "Last 7 days" : "Older";
}
