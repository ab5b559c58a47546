// Files for the next message, as text: chosen, dropped or pasted. Each is measured in tokens before it is taken.

import { element, iconButton, ICONS } from "../element.js";

const MOST_BYTES = 2_000_000;
const LONG_PASTE = 8_000; // characters: as a file it does not fill the box

export class Attachments extends EventTarget {
  constructor(root, meter) {
    super();
    Object.assign(this, { root, meter });
    this.files = []; // { name, text, tokens }
  }

  get empty() {
    return !this.files.length;
  }

  async add(list) {
    for (const file of list) {
      try {
        this.files.push(await this.read(file));
        this.note("");
      } catch (error) {
        this.note(`${file.name}: ${error.message}`);
      }
    }
    this.draw();
  }

  async read(file) {
    if (file.size > MOST_BYTES) throw new Error(`too large; at most ${MOST_BYTES / 1e6} MB of text can be attached.`);
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch {
      throw new Error("not a text file. Only text can be attached.");
    }
    if (text.includes("\0")) throw new Error("not a text file. Only text can be attached.");
    const tokens = await this.meter.countText(text);
    const { limit } = this.meter;
    if (tokens !== null && limit && tokens >= limit) {
      throw new Error(`${tokens.toLocaleString("en")} tokens, and the context of this model holds ${limit.toLocaleString("en")}.`);
    }
    return { name: file.name.slice(0, 200), text, tokens };
  }

  // True if the paste was taken as files.
  paste(data) {
    const files = [...data.files];
    const text = data.getData("text/plain");
    if (!files.length && text.length > LONG_PASTE) files.push(new File([text], "pasted text.txt"));
    if (files.length) this.add(files);
    return files.length > 0;
  }

  take() {
    const taken = this.files.map(({ name, text }) => ({ name, text }));
    this.files = [];
    this.note("");
    this.draw();
    return taken;
  }

  note(text) {
    this.root.querySelector(".form-note").textContent = text;
  }

  draw() {
    const chips = this.files.map((file) => {
      const size = file.tokens === null ? "" : ` ${file.tokens.toLocaleString("en")} tokens`;
      const remove = iconButton(`Remove ${file.name}`, ICONS.remove, () => {
        this.files = this.files.filter((one) => one !== file);
        this.draw();
      });
      return element("li", { class: "chip" }, element("span", { class: "chip-name" }, file.name), element("span", { class: "hint" }, size), remove);
    });
    this.root.querySelector("ul").replaceChildren(...chips);
    this.dispatchEvent(new Event("changed"));
  }
}
