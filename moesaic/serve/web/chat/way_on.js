// Says when the conversation is about to outgrow the model's context, and offers what can be done.

import { element } from "../element.js";

const WAYS = [
  ["leave-out", "Leave out the oldest turns", "They stay here, and are no longer sent."],
  ["summarise", "Summarise the oldest turns", "The model writes a summary, which is sent in their place."],
  ["start-new", "New chat from here", "A new conversation with the last exchange."],
];

export class WayOn {
  constructor(root, act) {
    Object.assign(this, { root, act });
    this.state = "fits";
  }

  // `possible`: whether there are older turns that could be left out.
  show(state, { used, limit, possible, busy = "" }) {
    this.root.hidden = state === "fits";
    const mark = JSON.stringify([state, possible, busy]);
    if (state === "fits" || mark === this.mark) {
      this.mark = mark;
      return;
    }
    this.mark = mark;
    const [taken, whole] = [Number.isFinite(used) ? used.toLocaleString("en") : "Too many", limit.toLocaleString("en")];
    let text = state === "over" ? `This is longer than the model's context: ${taken} of ${whole} tokens.` : `The context is nearly full: ${taken} of ${whole} tokens.`;
    if (!possible) text += state === "over" ? " Shorten the message or its attachments." : "";
    const buttons = WAYS.map(([action, label, hint]) => {
      const made = element("button", { type: "button", class: "plain", "data-way": action, title: hint, disabled: Boolean(busy) }, label);
      made.addEventListener("click", () => this.act(action));
      return made;
    });
    this.root.replaceChildren(element("p", { role: "alert" }, busy || text), element("div", { class: "ways" }, ...(possible ? buttons : [])));
  }
}
