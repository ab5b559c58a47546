// Sends what was written, once it fits the model's context; where it does not, the ways on are offered and nothing is lost.

import { toast } from "../page/toast.js";
import { withAttachments } from "./prompt.js";
import { Session } from "./session.js";
import { leaveOutOldest, summariseOldest } from "./shorten.js";
import { WayOn } from "./way_on.js";

const WAIT = 300; // ms after the last key before it is counted again

export class Sending {
  constructor(chat, composer, meter) {
    Object.assign(this, { chat, composer, meter });
    this.wayOn = new WayOn(document.getElementById("way-on"), (action) => this.goOn(action));
    this.sending = false;
    this.busy = "";
    composer.addEventListener("send", () => this.send());
    composer.addEventListener("stop", () => chat.stop());
    composer.addEventListener("changed", () => this.measureSoon());
    for (const kind of ["opened", "drawn", "running"]) chat.addEventListener(kind, () => this.measureSoon());
    meter.models.addEventListener("changed", () => this.measureSoon());
    meter.toolbox.addEventListener("changed", () => this.measureSoon());
  }

  measureSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.measure(), WAIT);
  }

  get draft() {
    return this.composer.empty ? [] : [{ role: "user", content: withAttachments(this.composer.draft) }];
  }

  // Counts and shows what would be sent now; resolves to "fits", "near" or "over".
  async measure() {
    const { meter, chat } = this;
    clearTimeout(this.timer);
    if (chat.session.running && !this.sending) return "fits";
    const said = chat.session.path.length ? chat.session.prompt() : [];
    const system = !said.length && !this.composer.empty ? chat.session.prompt([]) : [];
    const number = (this.measured = (this.measured ?? 0) + 1);
    const used = await meter.count([...system, ...said, ...this.draft]);
    const state = meter.state(used);
    if (number !== this.measured) return state; // a newer count is on its way to be shown
    meter.show(used);
    this.wayOn.show(state, { used, limit: meter.limit, possible: chat.session.path.length > 1, busy: this.busy });
    return state;
  }

  async send() {
    if (this.sending || this.composer.empty || this.chat.session.running) return;
    this.sending = true;
    try {
      if ((await this.measure()) === "over") return;
      const { text, attachments } = this.composer.take();
      this.chat.comparing = null;
      this.chat.scrolling.atEnd = true; // whoever sends wants to see the answer
      const answered = this.chat.session.send(text, attachments);
      this.composer.focus();
      this.sending = false;
      await answered;
    } catch (error) {
      toast(error.message);
    } finally {
      this.sending = false;
    }
  }

  async goOn(action) {
    const { chat, meter } = this;
    this.busy = action === "summarise" ? "Summarising the oldest turns…" : "One moment…";
    await this.measure();
    try {
      if (action === "start-new") await this.startFromHere();
      else if (action === "leave-out") this.told(await leaveOutOldest(chat.session, meter, this.draft));
      else this.told(await summariseOldest(chat.session, meter, chat.context.api, this.draft));
    } catch (error) {
      toast(error.message);
    }
    this.busy = "";
    chat.draw();
    await this.measure();
    this.composer.focus();
  }

  told(possible) {
    if (!possible) toast("There are no older turns to leave out: shorten the message.");
  }

  // A new conversation that begins with the last exchange.
  async startFromHere() {
    const { chat } = this;
    const { path, record } = chat.session;
    const last = path.findLastIndex((one) => one.role === "user");
    const fresh = new Session(chat.context, { record: { title: "", system: record.system }, messages: [], tokens: [] });
    const kept = last >= 0 && path.length - last > 1 ? path.slice(last) : [];
    for (const { role, content, attachments, calls, call } of kept) {
      await fresh.add({ role, content, ...(attachments ? { attachments } : {}), ...(calls ? { calls } : {}), ...(call ? { call } : {}) });
    }
    chat.show(fresh);
  }
}
