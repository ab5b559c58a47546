// The keys of the page, and the list of them that `?` shows.

const byId = (id) => document.getElementById(id);
const writing = (target) => target.closest?.("input:not([type=checkbox], [type=range]), textarea, select, [contenteditable]");

export class Shortcuts {
  constructor(chat, composer, panels) {
    Object.assign(this, { chat, composer, panels });
    document.addEventListener("keydown", (event) => this.take(event));
    byId("show-keys").addEventListener("click", () => byId("keys-dialog").showModal());
    byId("keys-close").addEventListener("click", () => byId("keys-dialog").close());
  }

  take(event) {
    if (document.querySelector("dialog[open]")) return;
    const command = event.ctrlKey || event.metaKey;
    const action = command && event.shiftKey ? this.commands[event.key.toLowerCase()] : command && event.key.toLowerCase() === "k" ? this.search : null;
    if (action) {
      event.preventDefault();
      action.call(this);
    } else if (event.altKey && !command) this.walk(event);
    else if (!command) this.plain(event);
  }

  commands = {
    o() {
      this.chat.startNew();
    },
    e() {
      this.panels.settings.toggle();
    },
    l() {
      this.panels.conversations.toggle();
    },
  };

  search() {
    this.panels.conversations.set(true);
    byId("search").select();
  }

  plain(event) {
    if (event.key === "Escape" && this.chat.session.running) this.chat.stop();
    else if (event.key === "?" && !writing(event.target)) {
      event.preventDefault();
      byId("keys-dialog").showModal();
    } else if (event.key === "ArrowUp" && event.target === this.composer.box && !this.composer.box.value) {
      event.preventDefault();
      [...this.chat.list.querySelectorAll(".mine")].at(-1)?.view.edit();
    } else if (event.key.length === 1 && document.activeElement === document.body) this.composer.focus(); // typing with nothing chosen means to write
  }

  // Alt with up and down goes from message to message, with left and right from version to version.
  walk(event) {
    const messages = [...this.chat.list.querySelectorAll(".message")];
    const here = document.activeElement.closest(".message");
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (step) {
      const next = here ? messages[messages.indexOf(here) + step] : step < 0 ? messages.at(-1) : null;
      event.preventDefault();
      if (next) next.focus();
      else if (step > 0) this.composer.focus();
    }
    const turn = { ArrowLeft: "Previous version", ArrowRight: "Next version" }[event.key];
    const button = turn && here?.querySelector(`[aria-label="${turn}"]:not(:disabled)`);
    if (button) {
      event.preventDefault();
      button.focus();
      button.click();
    }
  }
}
