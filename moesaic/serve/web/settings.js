// How responses are sampled and shown: the form in the side panel, remembered in this browser.

import { recall, remember } from "./storage.js";

const DEFAULTS = { system: "", temperature: 0.7, top_p: 0.95, max_tokens: 1024, seed: null, logprobs: true, colour: false };

export class Settings {
  constructor(form) {
    this.form = form;
    this.defaults = { ...DEFAULTS };
    this.values = { ...DEFAULTS, ...recall("settings", {}) };
    this.fill();
    form.addEventListener("input", () => this.read());
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      this.values = { ...this.defaults };
      this.fill();
      this.keep();
    });
  }

  // The model's own sampling defaults, unless the user has chosen.
  setDefaults({ temperature, top_p }) {
    if (temperature !== undefined) this.defaults.temperature = temperature;
    if (top_p !== undefined) this.defaults.top_p = top_p;
    this.values = { ...this.defaults, ...recall("settings", {}) };
    this.fill();
  }

  fill() {
    for (const [name, value] of Object.entries(this.values)) {
      const field = this.form.elements[name];
      if (!field) continue;
      if (field.type === "checkbox") field.checked = Boolean(value);
      else field.value = value ?? "";
    }
    this.show();
  }

  read() {
    for (const name of Object.keys(DEFAULTS)) {
      const field = this.form.elements[name];
      if (field.type === "checkbox") this.values[name] = field.checked;
      else if (field.type === "textarea") this.values[name] = field.value;
      else if (field.value === "") this.values[name] = null;
      else if (field.checkValidity()) this.values[name] = Number(field.value);
    }
    this.show();
    this.keep();
  }

  keep() {
    remember("settings", this.values);
  }

  show() {
    for (const output of this.form.querySelectorAll("output")) {
      output.value = Number(this.form.elements[output.htmlFor.value].value).toFixed(2);
    }
    document.documentElement.classList.toggle("coloured", this.values.colour);
  }

  // The sampling parameters of a request.
  forRequest() {
    const { temperature, top_p, max_tokens, seed, logprobs } = this.values;
    const params = { temperature, top_p, max_tokens, seed, ...(logprobs ? { logprobs: true, top_logprobs: 5 } : {}) };
    return Object.fromEntries(Object.entries(params).filter(([, value]) => value !== null));
  }
}
