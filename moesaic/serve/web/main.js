// Puts the page together.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Conversation } from "./conversation.js";
import { Live } from "./engine.js";
import { Settings } from "./settings.js";
import { recall, remember } from "./storage.js";

const byId = (id) => document.getElementById(id);

const api = new Api(askKey);
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
const settings = new Settings(byId("settings"));
const chat = new Chat(api, settings, new Conversation());
const live = new Live(api);
switchTheme();
openSide();
showModel();

// An API key from the user, or null. `again`: the last one was not accepted.
function askKey(again) {
  const dialog = byId("key-dialog");
  const note = "It is kept until you close this tab, and sent to this server only.";
  byId("key-note").textContent = again ? `That key was not accepted. ${note}` : note;
  byId("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? byId("key").value.trim() : null), { once: true });
  });
}

function switchTheme() {
  const button = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const show = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    live.map.draw();
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    remember("theme", document.documentElement.dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  show();
}

// On a wide screen the panel stands beside the conversation, on a narrow one it slides over it.
function openSide() {
  const button = byId("side-toggle");
  const wide = matchMedia("(min-width: 64rem)");
  let open = wide.matches && recall("side", true);
  const show = () => {
    document.body.classList.toggle("with-side", open);
    button.setAttribute("aria-expanded", String(open));
    byId("side").inert = !open;
    live.update(open);
  };
  const set = (next) => {
    open = next;
    if (wide.matches) remember("side", open);
    show();
  };
  button.addEventListener("click", () => set(!open));
  byId("veil").addEventListener("click", () => set(false));
  byId("side").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || wide.matches) return;
    set(false);
    button.focus();
  });
  wide.addEventListener("change", () => {
    open = wide.matches && recall("side", true);
    show();
  });
  show();
}

async function showModel() {
  try {
    const { data } = await api.json("/v1/models");
    chat.model = data[0]?.id ?? null;
    settings.setDefaults(data[0]?.sampling ?? {});
    byId("model").textContent = chat.model ?? "";
    byId("model").title = chat.model ?? "";
    if (chat.model) document.title = `${chat.model.split("/").at(-1)} · Moesaic`;
  } catch (error) {
    byId("model").textContent = error.status === 401 ? "API key required" : "server unreachable";
  }
}
