// The model of the next response: the server's own, or one of its adapters.

import { element } from "../element.js";
import { recall, remember } from "../store/preferences.js";

export class Models extends EventTarget {
  // Tells "changed", and "chosen" where the user did it.
  constructor(api, choice, name) {
    super();
    Object.assign(this, { api, choice, name });
    this.cards = [];
    this.wanted = recall("model", null);
    choice.addEventListener("change", () => {
      remember("model", choice.value);
      this.prefer(choice.value);
      this.dispatchEvent(new Event("chosen"));
    });
    document.addEventListener("visibilitychange", () => document.hidden || this.load()); // adapters come and go
  }

  get current() {
    return this.cards.find((card) => card.id === this.wanted) ?? this.cards[0] ?? null;
  }

  async load() {
    try {
      this.cards = (await this.api.json("/v1/models")).data;
      this.draw();
    } catch (error) {
      this.name.textContent = error.status === 401 ? "API key required" : "server unreachable";
    }
  }

  // One that the server no longer has gives way to its first.
  prefer(id) {
    this.wanted = id;
    if (this.cards.length) this.draw();
  }

  draw() {
    const { current, cards } = this;
    const several = cards.length > 1;
    this.name.hidden = several;
    this.choice.hidden = !several;
    this.name.textContent = this.name.title = current?.id ?? "";
    const option = ({ id }) => element("option", { value: id }, id);
    const adaptersOf = (id) => cards.filter((card) => card.parent === id).map(option);
    const parts = cards
      .filter((card) => !card.parent)
      .flatMap((card) => {
        const adapters = adaptersOf(card.id);
        return [option(card), ...(adapters.length ? [element("optgroup", { label: `Adapters of ${card.id}` }, ...adapters)] : [])];
      });
    if (several) this.choice.replaceChildren(...parts);
    if (current) this.choice.value = current.id;
    if (current) document.title = `${current.id.split("/").at(-1)} · Moesaic`;
    this.dispatchEvent(new Event("changed"));
  }
}
