// Copy a text, and say on the button that it is done.

import { element, icon, ICONS } from "../element.js";

export async function copyText(text, button) {
  const label = button.getAttribute("aria-label") ?? button.textContent;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copyBySelection(text); // the clipboard proper is open to secure pages only
  }
  const word = done ? "Copied" : "Not copied";
  const faces = [...button.childNodes];
  button.replaceChildren(faces[0]?.nodeType === Node.TEXT_NODE ? word : icon(...(done ? ICONS.done : ICONS.copy)));
  button.setAttribute("aria-label", word);
  setTimeout(() => {
    button.replaceChildren(...faces);
    button.setAttribute("aria-label", label);
  }, 1500);
}

function copyBySelection(text) {
  const box = element("textarea", { class: "unseen", "aria-hidden": "true" });
  box.value = text;
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  return done;
}
