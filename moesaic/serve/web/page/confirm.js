// A question in a dialog, instead of the browser's own: resolves to true, false, or the text that was asked for.

import { element } from "../element.js";

export function confirm({ title, text = "", yes = "Continue", field = null }) {
  const input = field ? element("input", { type: "text", value: field.value ?? "", maxlength: "200" }) : null;
  const cancel = element("button", { type: "button", class: "plain" }, "Cancel");
  const form = element(
    "form",
    { method: "dialog" },
    element("h2", { id: "confirm-title" }, title),
    text ? element("p", {}, text) : "",
    input ? element("label", { class: "field wide" }, field.label, input) : "",
    element("div", { class: "row" }, cancel, element("button", { type: "submit", value: "yes", class: "primary" }, yes)),
  );
  const dialog = element("dialog", { "aria-labelledby": "confirm-title", class: "confirm" }, form);
  document.body.append(dialog);
  dialog.showModal();
  input?.select();
  cancel.addEventListener("click", () => dialog.close());
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      const agreed = dialog.returnValue === "yes";
      resolve(input ? (agreed ? input.value.trim() : null) : agreed);
    });
  });
}
