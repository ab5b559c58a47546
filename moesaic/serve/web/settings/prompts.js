// The system prompt of the conversation, and those the user has saved by name.

import { element } from "../element.js";
import { confirm } from "../page/confirm.js";
import { toast } from "../page/toast.js";
import { recall, remember } from "../store/preferences.js";

// Read anew before every change: another tab may have saved one.
const saved = () => {
  const found = recall("prompts", []);
  return Array.isArray(found) ? found.filter((one) => typeof one?.name === "string" && typeof one?.text === "string") : [];
};

export class SystemPrompt extends EventTarget {
  constructor(root) {
    super();
    this.box = root.querySelector("textarea");
    this.choice = root.querySelector("select");
    this.remove = root.querySelector(".delete-prompt");
    this.box.value = recall("system", "");
    this.box.addEventListener("input", () => this.changed());
    this.choice.addEventListener("change", () => {
      const found = saved().find((one) => one.name === this.choice.value);
      if (!found) return;
      this.box.value = found.text;
      this.changed();
    });
    root.querySelector(".save-prompt").addEventListener("click", () => this.save());
    this.remove.addEventListener("click", () => this.forget());
    this.choice.addEventListener("focus", () => this.list());
    addEventListener("storage", (event) => event.key === "moesaic.prompts" && this.list());
    this.list();
  }

  get value() {
    return this.box.value;
  }

  // That of the conversation which is opened; a new one begins with the last that was written.
  show(text) {
    this.box.value = text ?? recall("system", "");
    this.list();
  }

  changed() {
    remember("system", this.box.value);
    this.list();
    this.dispatchEvent(new Event("changed"));
  }

  list() {
    const all = saved();
    const current = all.find((one) => one.text === this.box.value)?.name ?? "";
    this.choice.replaceChildren(
      element("option", { value: "" }, all.length ? "Saved prompts" : "No saved prompts"),
      ...all.map(({ name }) => element("option", { value: name }, name)),
    );
    this.choice.value = current;
    this.choice.disabled = !all.length;
    this.remove.hidden = !current;
  }

  async save() {
    if (!this.box.value.trim()) return toast("There is no system prompt to save.");
    const value = this.choice.value || this.box.value.trim().split("\n")[0].slice(0, 40);
    const name = await confirm({ title: "Save the system prompt", yes: "Save", field: { label: "Name", value } });
    if (!name) return;
    const others = saved().filter((one) => one.name !== name);
    remember("prompts", [...others, { name, text: this.box.value }].sort((a, b) => a.name.localeCompare(b.name)));
    this.list();
  }

  forget() {
    const before = saved();
    const name = this.choice.value;
    remember("prompts", before.filter((one) => one.name !== name));
    this.list();
    toast(`Deleted the prompt “${name}”.`, () => {
      remember("prompts", [...saved().filter((one) => one.name !== name), before.find((one) => one.name === name)]);
      this.list();
    });
  }
}
