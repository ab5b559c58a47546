// Puts the page together.

import { Api } from "./api.js";
import { Chat } from "./chat/chat.js";
import { Composer } from "./chat/composer.js";
import { ContextMeter } from "./chat/context_meter.js";
import { Sending } from "./chat/sending.js";
import { Live } from "./engine/engine.js";
import { Announcer } from "./page/announcer.js";
import { ConversationList } from "./page/conversation_list.js";
import { keepFolds } from "./page/folds.js";
import { askKey } from "./page/key_dialog.js";
import { Panel } from "./page/panel.js";
import { Shortcuts } from "./page/shortcuts.js";
import { themeSwitch } from "./page/theme_switch.js";
import { toast } from "./page/toast.js";
import { Models } from "./settings/models.js";
import { SystemPrompt } from "./settings/prompts.js";
import { Settings } from "./settings/settings.js";
import { supportedFields } from "./settings/supported.js";
import { openDatabase } from "./store/database.js";
import { Library } from "./store/library.js";
import { Knowledge } from "./tools/knowledge.js";
import { ServersPanel } from "./tools/servers_panel.js";
import { Toolbox } from "./tools/toolbox.js";

const byId = (id) => document.getElementById(id);

keepFolds();
const api = new Api(askKey);
const settings = new Settings(byId("settings"));
const systemPrompt = new SystemPrompt(byId("system-prompt"));
const models = new Models(api, byId("models"), byId("model"));
const toolbox = new Toolbox(api);
const knowledge = new Knowledge(api, byId("know"));
const meter = new ContextMeter(api, models, toolbox, byId("context"));
const opening = openDatabase();
const library = new Library(opening);
library.adoptOld().then(() => library.prune());

const context = { api, library, toolbox, system: () => systemPrompt.value, model: () => models.current?.id, request };
const composer = new Composer(meter);
const chat = new Chat(context, composer, new Announcer(byId("announcer")));
new Sending(chat, composer, meter);
const list = new ConversationList(byId("library"), library, chat);
new ServersPanel(byId("mcp"), toolbox);
const panels = {
  conversations: new Panel(byId("library"), byId("library-toggle"), "library", "(min-width: 56rem)"),
  settings: new Panel(byId("side"), byId("side-toggle"), "side", "(min-width: 78rem)"),
};
new Shortcuts(chat, composer, panels);
const live = new Live(api, byId("engine"));
themeSwitch(byId("theme"), () => live.map.draw());
connect();
models.load();
toolbox.start();
knowledge.start();
supportedFields(api).then((known) => known && settings.offer(known));
opening.then(({ lasting }) => lasting || toast("This browser keeps no data for this page: conversations are gone when it is closed."));

// The settings of a request. There is no room for more tokens than the context has left.
async function request(messages) {
  const tools = [...(toolbox.forRequest().tools ?? []), ...knowledge.forRequest()];
  const made = { ...settings.forRequest(), ...(tools.length ? { tools } : {}), model: models.current?.id };
  const used = await meter.count(messages);
  if (made.max_tokens && used && meter.limit > used) made.max_tokens = Math.min(made.max_tokens, meter.limit - used);
  return made;
}

// What one part tells another.
function connect() {
  const { conversations, settings: side } = panels;
  const watch = () => live.update(side.open);
  side.addEventListener("changed", watch);
  watch();
  byId("veil").addEventListener("click", () => Object.values(panels).forEach((panel) => panel.close()));
  byId("library").addEventListener("chosen", () => conversations.close());
  byId("new-chat").addEventListener("click", () => {
    conversations.close();
    chat.startNew();
  });
  byId("ideas").addEventListener("click", (event) => {
    if (!event.target.matches("button")) return;
    composer.write(event.target.textContent);
    composer.tell("send");
  });
  models.addEventListener("changed", () => settings.setDefaults(models.current?.sampling ?? {}));
  models.addEventListener("chosen", () => chat.session.update({ model: models.current?.id }));
  chat.addEventListener("opened", () => {
    systemPrompt.show(chat.session.id ? (chat.session.record.system ?? "") : undefined);
    if (chat.session.record.model) models.prefer(chat.session.record.model);
    sessionStorage.setItem("moesaic.open", chat.session.id ?? "");
  });
  chat.addEventListener("running", () => sessionStorage.setItem("moesaic.open", chat.session.id ?? ""));
  systemPrompt.addEventListener("changed", () => {
    if (chat.session.id) chat.session.update({ system: systemPrompt.value });
  });
  library.addEventListener("changed", ({ detail }) => {
    if (detail.elsewhere && detail.id === chat.session.id) chat.session.refresh();
  });
  library.addEventListener("unstored", ({ detail }) => toast(`This could not be stored in the browser (${detail.error.name}). Export or delete conversations.`));
  library.addEventListener("removed", ({ detail }) => {
    if (detail.elsewhere && detail.id === chat.session.id) {
      chat.startNew();
      toast("This conversation was deleted in another tab.");
    }
  });
  // A tab that is reloaded shows what it showed.
  const open = sessionStorage.getItem("moesaic.open");
  if (open) chat.openId(open);
  list.drawSoon();
}
