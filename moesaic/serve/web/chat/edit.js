// The form in which a message is edited, in its place.

import { element } from "../element.js";

// `done` gets the new text, or null.
export function editForm(content, verb, done) {
  const box = element("textarea", { "aria-label": "Message", rows: "1" });
  box.value = content;
  const cancel = element("button", { type: "button", class: "plain" }, "Cancel");
  const form = element("form", { class: "edit" }, box, element("div", { class: "row" }, cancel, element("button", { type: "submit", class: "primary" }, verb)));
  const close = (text) => {
    form.remove();
    done(text);
  };
  cancel.addEventListener("click", () => close(null));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (box.value.trim()) close(box.value);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close(null);
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  box.addEventListener("input", () => fit(box));
  form.begin = () => {
    fit(box);
    box.focus();
  };
  return form;
}

// A text box as tall as its text.
export function fit(box) {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}
