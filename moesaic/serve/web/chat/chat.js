// The conversation on the page: draws the session that is open, and does what the user chooses.

import { element } from "../element.js";
import { copyText } from "../page/clipboard.js";
import { Scrolling } from "../page/scrolling.js";
import { toast } from "../page/toast.js";
import { showTokenCards } from "../text/tokens.js";
import { Session } from "./session.js";
import { compareRow, cutRow } from "./rows.js";
import { MessageView } from "./message.js";

const byId = (id) => document.getElementById(id);

export class Chat extends EventTarget {
  // Tells "opened" (another conversation is shown), "drawn" and "running".
  constructor(context, composer, announcer) {
    super();
    Object.assign(this, { context, composer, announcer, toolbox: context.toolbox });
    this.list = byId("messages");
    this.scrolling = new Scrolling(byId("scroll"), byId("latest"));
    this.views = new Map();
    this.open = new Map(); // sessions that still generate while another is shown
    this.comparing = null; // the id of a message whose other versions stand beside it
    this.session = null;
    this.show(new Session(context));
    this.listen();
  }

  listen() {
    this.list.addEventListener("click", (event) => {
      const button = event.target.closest(".copy-code");
      if (button) copyText(button.closest("figure").querySelector("code").textContent, button);
    });
    showTokenCards(this.list, byId("card"), (span) => span.closest(".message")?.view.tokens);
    this.toolbox.addEventListener("changed", () => this.draw());
  }

  // Conversations

  show(session) {
    this.session = session;
    this.views.clear();
    this.comparing = null;
    this.list.replaceChildren();
    if (!session.shown) {
      session.shown = true;
      session.addEventListener("drawn", () => session === this.session && this.draw());
      session.addEventListener("grown", ({ detail }) => session === this.session && this.grow(detail));
      session.addEventListener("running", ({ detail }) => this.noteRunning(session, detail.message));
    }
    this.draw();
    this.composer.showRunning(Boolean(session.running));
    this.scrolling.toEnd();
    this.dispatchEvent(new Event("opened"));
  }

  startNew() {
    if (this.session.id) this.show(new Session(this.context));
    this.composer.focus();
  }

  async openId(id) {
    if (id === this.session.id) return;
    const found = this.open.get(id) ?? new Session(this.context, (await this.context.library.load(id)) ?? undefined);
    if (found.id) this.show(found);
  }

  noteRunning(session, message) {
    if (session.running) this.open.set(session.id, session);
    else this.open.delete(session.id);
    if (session === this.session) {
      this.composer.showRunning(Boolean(session.running));
      if (!session.running) this.announcer.finish();
      this.views.get(message.id)?.draw();
      this.scrolling.follow();
    } else if (!session.running) toast(`“${session.record.title}” has its answer.`, () => this.openId(session.id), "Show");
    this.dispatchEvent(new Event("running"));
  }

  // Drawing

  grow({ message, text }) {
    const view = this.views.get(message.id);
    if (text) this.announcer.push(text);
    view?.drawSoon();
    requestAnimationFrame(() => this.scrolling.follow());
  }

  view(message) {
    let found = this.views.get(message.id);
    if (found?.message !== message) {
      found = new MessageView(message, this.session, this);
      this.views.set(message.id, found);
    } else found.draw();
    return found;
  }

  draw() {
    const { session } = this;
    const { atEnd } = this.scrolling;
    const rows = [];
    const { path } = session;
    for (const [place, message] of path.entries()) {
      if (message.role === "tool") continue; // shown with its call
      if (place > 0 && message.id === session.record.cut) rows.push(cutRow(session.record.summary, () => this.includeAll()));
      const answers = session.tree.siblings(message);
      if (this.comparing && message.role === "assistant" && answers.some((one) => one.id === this.comparing)) {
        const views = answers.map((one) => this.view(one));
        rows.push(compareRow(views, message, (view) => this.act("use", view)));
        break;
      }
      rows.push(this.view(message).root);
    }
    rows.forEach((row, place) => this.list.children[place] === row || this.list.insertBefore(row, this.list.children[place] ?? null));
    while (this.list.children.length > rows.length) this.list.lastChild.remove();
    byId("welcome").hidden = path.length > 0;
    if (atEnd) this.scrolling.toEnd();
    else this.scrolling.note();
    this.dispatchEvent(new Event("drawn"));
  }

  async includeAll() {
    await this.session.update({ cut: null, summary: null });
    this.draw();
  }

  // Actions

  async act(action, view, extra) {
    const { session } = this;
    const { message } = view;
    if (action === "decide") return session.decide(extra.decision, message, extra.call);
    await session.stop();
    if (action === "version") this.turnTo(extra);
    else if (action === "remove") await this.remove(message);
    else if (action === "use") {
      this.comparing = null;
      this.turnTo(message);
    } else if (action === "edit") {
      this.comparing = null;
      await session.rewrite(message, extra);
    } else if (action === "continue") await session.resume(message);
    else {
      this.comparing = action === "beside" ? message.id : null;
      this.scrolling.atEnd = action !== "beside";
      const answered = session.regenerate(message);
      if (action === "beside") session.addEventListener("running", () => this.list.querySelector(".compare")?.scrollIntoView({ block: "start" }), { once: true });
      await answered;
    }
    return null;
  }

  // Shows another version, with the focus where it was: on the button that leads on.
  turnTo(message) {
    const label = document.activeElement?.closest(".versions") ? document.activeElement.getAttribute("aria-label") : null;
    this.session.switchTo(message);
    const { root } = this.view(message);
    if (label) (root.querySelector(`[aria-label="${label}"]:not(:disabled)`) ?? root).focus();
  }

  async remove(message) {
    const undo = await this.session.remove(message);
    toast("Message deleted.", undo);
    this.composer.focus();
  }

  stop() {
    return this.session.stop();
  }
}
