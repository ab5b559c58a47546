// Rows between messages: answers side by side, and where what is sent to the model begins.

import { element } from "../element.js";

// Answers to one question next to each other; `use` goes on with one of them.
export function compareRow(views, current, use) {
  const columns = views.map((view, number) => {
    const chosen = view.message === current;
    const button = element("button", { type: "button", class: chosen ? "primary" : "plain" }, "Use this answer");
    button.addEventListener("click", () => use(view));
    const head = element("div", { class: "column-head" }, element("h3", {}, `Answer ${number + 1}`), button);
    return element("div", { class: `column${chosen ? " chosen" : ""}`, role: "group", "aria-label": `Answer ${number + 1}` }, head, element("ol", { class: "column-body" }, view.root));
  });
  return element("li", { class: "compare", tabindex: "0", "aria-label": "Answers side by side" }, ...columns);
}

export function cutRow(summary, includeAll) {
  const button = element("button", { type: "button", class: "plain" }, "Send all again");
  button.addEventListener("click", includeAll);
  const text = summary ? "A summary is sent instead of the messages above." : "The messages above are not sent to the model.";
  const parts = [element("p", {}, text), button];
  if (summary) parts.push(element("details", { class: "reasoning" }, element("summary", {}, "Summary"), element("p", { class: "reasoning-text" }, summary)));
  return element("li", { class: "cut" }, ...parts);
}
