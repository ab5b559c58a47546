// The panel of MCP servers: add one (after agreeing to it), turn servers and single tools on and off.

import { element } from "../element.js";
import { confirm } from "../page/confirm.js";

export class ServersPanel {
  constructor(root, toolbox) {
    this.toolbox = toolbox;
    this.list = root.querySelector(".servers");
    this.count = root.querySelector(".count");
    this.note = root.querySelector(".form-note");
    const form = root.querySelector("form");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.add(form.elements.url);
    });
    toolbox.addEventListener("changed", () => this.draw());
    this.draw();
  }

  async add(field) {
    const text = field.value.trim();
    this.note.textContent = (await this.toolbox.problem(text)) ?? "";
    if (this.note.textContent) return;
    const agreed = await confirm({
      title: "Use the tools of this MCP server?",
      text: `The page will ask ${new URL(text).origin} for its tools and tell the model about them. When the model wants to call one, you see the call first; what it sends goes to that server.`,
      yes: "Use it",
    });
    if (!agreed) return;
    field.value = "";
    await this.toolbox.add(text);
  }

  draw() {
    const { entries, tools } = this.toolbox;
    this.count.textContent = tools.size ? `${tools.size} on` : "";
    this.list.replaceChildren(...entries.map((entry) => this.entry(entry)));
  }

  entry(entry) {
    const name = entry.server?.name ?? new URL(entry.url).host;
    const toggle = element("input", { type: "checkbox", checked: entry.on });
    toggle.addEventListener("change", () => this.toolbox.turn(entry, toggle.checked));
    const remove = element("button", { type: "button", class: "quiet", "aria-label": `Remove ${name}`, title: "Remove" }, "×");
    remove.addEventListener("click", () => this.toolbox.remove(entry));
    const head = element("div", { class: "server-head" }, element("label", { class: "check" }, toggle, element("span", {}, name)), remove);
    const wrong = entry.on && entry.state && !["ready", "connecting"].includes(entry.state);
    const note = element("p", { class: wrong ? "form-note" : "hint" }, wrong ? entry.state : entry.state === "connecting" ? "connecting…" : entry.url);
    const parts = [head, note];
    if (entry.on && entry.server) {
      const boxes = entry.server.tools.map((tool) => {
        const box = element("input", { type: "checkbox", checked: !entry.off.includes(tool.name) });
        box.addEventListener("change", () => this.toolbox.turnTool(entry, tool.name, box.checked));
        const what = tool.description.split("\n")[0].slice(0, 160);
        return element("li", {}, element("label", { class: "check" }, box, element("span", {}, element("code", {}, tool.name), what ? ` ${what}` : "")));
      });
      parts.push(element("ul", { class: "server-tools" }, ...boxes));
    }
    return element("li", { class: "server" }, ...parts);
  }
}
