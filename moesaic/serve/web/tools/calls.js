// The tool calls of a message: what is called with what, the user's consent, and the result, all as plain text.

import { element } from "../element.js";

// `results` holds, by the id of a call, the message with its result; `act(decision, call)` is called with "allow", "trust"
// or "refuse".
export function callCards(calls, results, toolbox, act) {
  return element("div", { class: "calls" }, ...calls.map((call) => card(call, results.get(call.id), toolbox, act)));
}

function card(call, result, toolbox, act) {
  const found = toolbox.tools.get(call.name);
  const parts = [
    element("p", { class: "call-name" }, "Tool call: ", element("code", {}, call.name), found ? element("span", { class: "from" }, ` from ${found.entry.server.name}`) : ""),
    element("pre", { tabindex: "0", "aria-label": "Arguments" }, pretty(call.arguments)),
  ];
  if (result) {
    const title = result.failed ? "Result: failed" : result.refused ? "Refused by you" : "Result";
    const long = result.content.length > 400;
    parts.push(element("details", { class: "result", open: !long }, element("summary", {}, title), element("pre", { tabindex: "0", "aria-label": "Result" }, result.content)));
  } else if (call.state === "running") parts.push(element("p", { class: "hint", role: "status" }, "Running…"));
  else if (call.state === "waiting" && found) parts.push(consent(call, found, act));
  else if (call.state === "waiting") parts.push(element("p", { class: "hint" }, "No server offers this tool now. "), choice("Refuse", "plain", () => act("refuse", call)));
  return element("section", { class: "call", "aria-label": `Call of ${call.name}` }, ...parts);
}

function consent(call, found, act) {
  const question = element("p", { role: "alert" }, `Let ${found.entry.server.name} run this?${found.tool.readOnly ? " It says that it only reads." : ""}`);
  return element(
    "div",
    { class: "consent" },
    question,
    element(
      "div",
      { class: "row" },
      choice("Refuse", "plain", () => act("refuse", call)),
      choice("Always, until I close the page", "plain", () => act("trust", call)),
      choice("Allow this call", "primary", () => act("allow", call)),
    ),
  );
}

function choice(text, style, action) {
  const made = element("button", { type: "button", class: style }, text);
  made.addEventListener("click", action);
  return made;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
