// A panel beside the conversation: on a wide screen it stands there, on a narrow one it slides over it.

import { recall, remember } from "../store/preferences.js";

export class Panel extends EventTarget {
  // Tells "changed". `wide` is the media query from which it stands beside.
  constructor(root, button, name, wide) {
    super();
    Object.assign(this, { root, button, name });
    this.wide = matchMedia(wide);
    this.open = this.wide.matches && recall(name, true);
    button.addEventListener("click", () => this.toggle());
    root.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || this.wide.matches) return;
      event.stopPropagation();
      this.set(false);
      button.focus();
    });
    this.wide.addEventListener("change", () => {
      this.open = this.wide.matches && recall(name, true);
      this.show();
    });
    this.show();
  }

  toggle() {
    this.set(!this.open);
  }

  set(open) {
    this.open = open;
    if (this.wide.matches) remember(this.name, open);
    this.show();
  }

  // Where it lies over the conversation, it is in the way once something was chosen.
  close() {
    if (!this.wide.matches) this.set(false);
  }

  show() {
    document.body.classList.toggle(`with-${this.name}`, this.open);
    this.button.setAttribute("aria-expanded", String(this.open));
    this.root.inert = !this.open;
    this.dispatchEvent(new Event("changed"));
  }
}
