// Folded parts of the page open as they were left.

import { recall, remember } from "../store/preferences.js";

export function keepFolds() {
  for (const part of document.querySelectorAll("details[data-fold]")) {
    const name = `fold.${part.dataset.fold}`;
    part.open = recall(name, part.open);
    part.addEventListener("toggle", () => remember(name, part.open));
  }
}
