// One message on the page: its text, the reasoning before it, and what can be done with it.

import { element, icon, ICONS } from "./element.js";
import { render } from "./markdown.js";
import { Tokens } from "./tokens.js";

export class MessageView {
  // `act` does what the user chose: act("again" | "edit", view, text?).
  constructor(message, act) {
    this.message = message;
    this.act = act;
    this.tokens = new Tokens(message.tokens);
    this.writing = false;
    this.drawn = false;
    const mine = message.role === "user";
    this.body = element("div", { class: mine ? "body user-text" : "body", tabindex: mine ? null : "0" });
    this.notes = element("div", { class: "notes" });
    this.facts = element("p", { class: "facts" });
    this.actions = element("div", { class: "actions" }, ...this.buttons());
    if (!mine) this.actions.append(this.facts);
    const name = element("h2", { class: "unseen" }, mine ? "You" : "Assistant");
    this.root = element("li", { class: `message ${mine ? "mine" : "theirs"}` }, name, this.notes, this.body, this.actions);
    this.root.view = this;
    this.draw();
  }

  buttons() {
    const button = (label, paths, action) => {
      const made = element("button", { type: "button", class: "quiet", title: label, "aria-label": label }, icon(...paths));
      made.addEventListener("click", action);
      return made;
    };
    const copy = button("Copy", ICONS.copy, () => copyText(this.message.content, copy));
    if (this.message.role === "user") return [button("Edit", ICONS.edit, () => this.edit()), copy];
    return [copy, button("Regenerate", ICONS.again, () => this.act("again", this))];
  }

  // Soon: many chunks may come before the next frame.
  drawSoon() {
    if (this.drawn) return;
    this.drawn = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.drawn = false;
    const { role, content, reasoning, calls, error } = this.message;
    this.root.classList.toggle("writing", this.writing);
    if (role === "user") {
      this.body.textContent = content;
      return;
    }
    const offset = this.tokens.offset(content);
    if (offset !== this.offset) render(this.body, ""); // its words belong to other tokens now
    this.offset = offset;
    render(this.body, content, (block) => this.tokens.wrap(block, offset));
    this.drawReasoning(reasoning);
    this.root.querySelector(".calls")?.remove();
    if (calls?.length) {
      const made = calls.map((call) => element("pre", { tabindex: "0" }, `${call.name}(${call.arguments})`));
      this.body.after(element("div", { class: "calls" }, ...made));
    }
    this.root.querySelector(".error")?.remove();
    if (error) this.body.after(element("p", { class: "error", role: "alert" }, error));
    this.body.hidden = !content && !this.writing;
    this.facts.textContent = this.message.facts ?? "";
  }

  drawReasoning(text) {
    if (!text) {
      this.notes.replaceChildren();
      return;
    }
    if (!this.notes.firstChild) {
      this.notes.append(element("details", { class: "reasoning" }, element("summary", {}), element("div", { class: "reasoning-text" })));
    }
    const [details] = this.notes.children;
    details.firstChild.textContent = this.writing && !this.message.content ? "Reasoning…" : "Reasoning";
    render(details.lastChild, text);
  }

  edit() {
    if (this.root.classList.contains("editing")) return;
    const box = element("textarea", { "aria-label": "Your message", rows: "1" });
    box.value = this.message.content;
    const cancel = element("button", { type: "button", class: "plain" }, "Cancel");
    const send = element("button", { type: "submit", class: "primary" }, "Send");
    const form = element("form", { class: "edit" }, box, element("div", { class: "row" }, cancel, send));
    const close = () => {
      form.remove();
      this.root.classList.remove("editing");
    };
    cancel.addEventListener("click", close);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!box.value.trim()) return;
      close();
      this.act("edit", this, box.value);
    });
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    box.addEventListener("input", () => fit(box));
    this.root.classList.add("editing");
    this.body.after(form);
    fit(box);
    box.focus();
  }
}

// A text box as tall as its text.
export function fit(box) {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

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
