// A short word at the foot of the page, with a way to undo what was just done.

import { element } from "../element.js";

const SECONDS = 12;
let timer = null;

export function toast(text, undo = null, label = "Undo") {
  const root = document.getElementById("toast");
  clearTimeout(timer);
  const hide = () => root.replaceChildren();
  const parts = [element("span", {}, text)];
  if (undo) {
    const button = element("button", { type: "button", class: "plain" }, label);
    button.addEventListener("click", () => {
      hide();
      undo();
    });
    parts.push(button);
  }
  const close = element("button", { type: "button", class: "quiet", "aria-label": "Dismiss", title: "Dismiss" }, "×");
  close.addEventListener("click", hide);
  const box = element("div", { class: "toast" }, ...parts, close);
  root.replaceChildren(box);
  // Whoever is on the way to the button gets the time for it.
  const wait = () => {
    timer = setTimeout(() => (box.matches(":hover, :focus-within") ? wait() : box.remove()), SECONDS * 1000);
  };
  wait();
}
