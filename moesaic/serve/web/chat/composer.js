// Where one writes: the box, attached files, and the button that sends or stops.

import { Attachments } from "./attachments.js";
import { fit } from "./edit.js";

const byId = (id) => document.getElementById(id);

export class Composer extends EventTarget {
  // Tells "send", "stop" and "changed".
  constructor(meter) {
    super();
    this.form = byId("composer");
    this.box = byId("prompt");
    this.attachments = new Attachments(byId("attachments"), meter);
    this.running = false;
    this.listen();
  }

  tell(kind) {
    this.dispatchEvent(new Event(kind));
  }

  listen() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.tell(this.running ? "stop" : "send");
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.tell("send");
    });
    this.box.addEventListener("input", () => {
      fit(this.box);
      this.tell("changed");
    });
    this.box.addEventListener("paste", (event) => {
      if (this.attachments.paste(event.clipboardData)) event.preventDefault();
    });
    this.attachments.addEventListener("changed", () => this.tell("changed"));
    const choose = byId("attach-file");
    byId("attach").addEventListener("click", () => choose.click());
    choose.addEventListener("change", () => {
      this.attachments.add([...choose.files]);
      choose.value = "";
    });
    this.takeDropped();
  }

  takeDropped() {
    const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
    const shade = (on) => document.body.classList.toggle("dropping", on);
    addEventListener("dragover", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      shade(true);
    });
    addEventListener("dragleave", (event) => event.relatedTarget || shade(false));
    addEventListener("drop", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      shade(false);
      this.attachments.add([...event.dataTransfer.files]);
      this.focus();
    });
  }

  get text() {
    return this.box.value.trim();
  }

  get empty() {
    return !this.text && this.attachments.empty;
  }

  // What is being written, as a message of a prompt.
  get draft() {
    return { role: "user", content: this.text, attachments: this.attachments.files };
  }

  take() {
    const taken = { text: this.text, attachments: this.attachments.take() };
    this.write("");
    return taken;
  }

  write(text) {
    this.box.value = text;
    fit(this.box);
    this.tell("changed");
  }

  focus() {
    this.box.focus({ preventScroll: true });
  }

  showRunning(running) {
    this.running = running;
    document.body.classList.toggle("answering", running);
    byId("send-label").textContent = running ? "Stop" : "Send";
    byId("send").title = running ? "Stop (Esc)" : "Send (Enter)";
  }
}
