// The switch "answer from texts": which knowledge base of the server an answer is drawn from, if any.

import { element } from "../element.js";
import { recall, remember } from "../store/preferences.js";

export class Knowledge {
  constructor(api, root) {
    Object.assign(this, { api, root, bases: [] });
    this.toggle = root.querySelector("input");
    this.choice = root.querySelector("select");
    this.toggle.addEventListener("change", () => this.keep());
    this.choice.addEventListener("change", () => this.keep());
  }

  async start() {
    try {
      this.bases = (await this.api.json("/page.json")).know ?? [];
    } catch {
      this.bases = []; // an older server
    }
    this.root.hidden = !this.bases.length;
    const all = this.bases.length > 1 ? [element("option", { value: "" }, "all texts")] : [];
    this.choice.replaceChildren(...all, ...this.bases.map((name) => element("option", { value: name }, name)));
    const { on, base } = recall("know", {});
    this.toggle.checked = Boolean(on);
    if (this.bases.includes(base)) this.choice.value = base;
    this.choice.disabled = !this.toggle.checked;
  }

  keep() {
    this.choice.disabled = !this.toggle.checked;
    remember("know", { on: this.toggle.checked, base: this.choice.value });
  }

  get on() {
    return this.bases.length > 0 && this.toggle.checked;
  }

  // As the API takes it: a tool of the server.
  forRequest() {
    if (!this.on) return [];
    const named = this.choice.value ? { vector_store_ids: [this.choice.value] } : {};
    return [{ type: "file_search", ...named }];
  }
}
