// How responses are sampled and shown: the form in the side panel, remembered in this browser.

import { element } from "../element.js";
import { recall, remember } from "../store/preferences.js";
import { DEFAULTS as SAMPLING, PARAMETERS, forRequest, parsed } from "./parameters.js";

const SWITCHES = { logprobs: true, colour: false };

export class Settings {
  constructor(form) {
    this.form = form;
    this.defaults = { ...SAMPLING, ...SWITCHES };
    this.chosen = recall("settings", {}); // only what the user has changed
    this.build();
    this.fill();
    form.addEventListener("input", (event) => this.read(event.target));
    form.addEventListener("submit", (event) => event.preventDefault());
    addEventListener("storage", (event) => {
      if (event.key !== "moesaic.settings") return; // another tab has changed them
      this.chosen = recall("settings", {});
      this.fill();
    });
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      this.chosen = {};
      this.fill();
      this.keep();
    });
  }

  get values() {
    return { ...this.defaults, ...this.chosen };
  }

  build() {
    for (const parameter of PARAMETERS) {
      this.form.querySelector(parameter.main ? ".main-settings" : ".more-settings").append(field(parameter));
    }
  }

  // The model's own sampling defaults, which hold until the user chooses.
  setDefaults(sampling) {
    this.defaults = { ...SAMPLING, ...SWITCHES };
    for (const { name, main } of PARAMETERS) {
      if (sampling[name] === undefined) continue;
      if (main) this.defaults[name] = sampling[name];
      else this.form.elements[name].placeholder = `${sampling[name]} (model)`; // the server applies it itself
    }
    this.fill();
  }

  // Hide what the server would not take.
  offer(known) {
    for (const { name } of PARAMETERS) this.form.elements[name].closest(".field").hidden = !known.has(name);
  }

  fill() {
    for (const [name, value] of Object.entries(this.values)) {
      const input = this.form.elements[name];
      if (!input) continue;
      if (input.type === "checkbox") input.checked = Boolean(value);
      else input.value = value ?? "";
    }
    this.show();
  }

  read(input) {
    const parameter = PARAMETERS.find(({ name }) => name === input.name);
    if (parameter) {
      const value = parsed(parameter, input.value);
      if (value === null && input.value !== "") return this.show(); // not a number it may be: the last one holds
      this.chosen[parameter.name] = value;
    } else if (input.name in SWITCHES) this.chosen[input.name] = input.checked;
    else return;
    this.show();
    this.keep();
  }

  keep() {
    remember("settings", this.chosen);
  }

  show() {
    for (const output of this.form.querySelectorAll("output")) {
      output.value = Number(this.form.elements[output.htmlFor.value].value).toFixed(2);
    }
    document.documentElement.classList.toggle("coloured", this.values.colour);
    const changed = PARAMETERS.filter(({ name, main }) => !main && this.values[name] !== null).length;
    this.form.querySelector(".more-count").textContent = changed ? `${changed} set` : "";
  }

  // The sampling parameters of a request.
  forRequest() {
    return { ...forRequest(this.values), ...(this.values.logprobs ? { logprobs: true, top_logprobs: 5 } : {}) };
  }
}

function field({ name, label, slide, text, min, max, step, off, hint, wide }) {
  const note = `${name}-hint`;
  const shared = { id: name, name, "aria-describedby": note };
  let input;
  if (slide) input = element("input", { ...shared, type: "range", min, max, step });
  else if (text) input = element("textarea", { ...shared, rows: "2", placeholder: off });
  else input = element("input", { ...shared, type: "number", min, max, step: "any", "data-step": step, inputmode: "decimal", placeholder: off });
  const title = slide ? element("span", {}, `${label} `, element("output", { for: name })) : label;
  // The explanation stands below the field, and is no part of its name.
  return element(
    "div",
    { class: `field${slide ? " slide" : ""}${wide ? " wide" : ""}` },
    element("label", { for: name }, title),
    input,
    element("small", { id: note, class: "hint" }, hint),
  );
}
