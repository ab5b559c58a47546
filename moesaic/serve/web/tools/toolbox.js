// The MCP servers the user has added, and the tools of those that are on. A server is talked to only after the user agreed
// to that server; a tool runs only after the user agreed to the call, or to this tool until the page is closed.

import { recall, remember } from "../store/preferences.js";
import { McpServer } from "./mcp.js";

export class Toolbox extends EventTarget {
  // `api` asks our own server which origins its policy lets the page talk to.
  constructor(api) {
    super();
    this.api = api;
    this.entries = []; // { url, on, state, server }
    this.trusted = new Set(); // tools that need no further consent, until the page is closed
    this.origins = null;
  }

  async start() {
    addEventListener("storage", (event) => event.key === "moesaic.mcp" && this.read());
    await this.read();
  }

  // The servers as they are stored, by this tab or another; those that are on and new here are connected.
  async read() {
    const kept = recall("mcp", []);
    const known = new Map(this.entries.map((entry) => [entry.url, entry]));
    this.entries = (Array.isArray(kept) ? kept : [])
      .filter((one) => URL.canParse(one?.url))
      .map(({ url, on, off }) => Object.assign(known.get(url) ?? { url }, { on: Boolean(on), off: Array.isArray(off) ? off : [] }));
    await Promise.all(this.entries.filter((entry) => entry.on && !entry.server).map((entry) => this.connect(entry)));
    this.changed();
  }

  keep() {
    remember("mcp", this.entries.map(({ url, on, off }) => ({ url, on, off })));
    this.changed();
  }

  changed() {
    this.dispatchEvent(new Event("changed"));
  }

  // Why a server cannot be used; null if it can.
  async problem(text) {
    let address;
    try {
      address = new URL(text);
    } catch {
      return "That is no address. It looks like http://127.0.0.1:9000/mcp.";
    }
    if (!/^https?:$/.test(address.protocol)) return "An MCP server's address begins with http:// or https://.";
    if (this.entries.some((entry) => entry.url === address.href)) return "That server is in the list already.";
    this.origins ??= (await this.api.json("/page.json")).mcp_origins;
    if (address.origin !== location.origin && !this.origins.includes(address.origin)) {
      return `This page may not talk to ${address.origin}. Start Moesaic with --mcp ${address.origin} to allow it.`;
    }
    return null;
  }

  async add(text) {
    const entry = { url: new URL(text).href, on: true, off: [] };
    this.entries.push(entry);
    await this.connect(entry);
    this.keep();
  }

  remove(entry) {
    this.entries = this.entries.filter((one) => one !== entry);
    this.keep();
  }

  async turn(entry, on) {
    entry.on = on;
    if (on && !entry.server) await this.connect(entry);
    this.keep();
  }

  turnTool(entry, name, on) {
    entry.off = on ? entry.off.filter((one) => one !== name) : [...entry.off, name];
    this.keep();
  }

  async connect(entry) {
    entry.state = "connecting";
    this.changed();
    try {
      const server = new McpServer(entry.url, () => this.api.key);
      await server.connect();
      Object.assign(entry, { server, state: "ready" });
    } catch (error) {
      Object.assign(entry, { server: null, state: error.message });
    }
    this.changed();
  }

  // The tools that are on, by the name the model knows them by; two servers may have tools of one name.
  get tools() {
    const found = new Map();
    for (const entry of this.entries) {
      if (!entry.on || !entry.server) continue;
      for (const tool of entry.server.tools) {
        if (entry.off.includes(tool.name)) continue;
        const plain = tool.name.replace(/[^a-zA-Z0-9_.:-]/g, "_").slice(0, 200);
        let name = plain;
        for (let number = 2; found.has(name); number++) name = `${plain}_${number}`;
        found.set(name, { entry, tool, key: `${entry.url} ${tool.name}` });
      }
    }
    return found;
  }

  // As the API takes them.
  forRequest() {
    const made = [...this.tools].map(([name, { tool }]) => ({
      type: "function",
      function: { name, description: tool.description.slice(0, 4000), parameters: tool.parameters },
    }));
    return made.length ? { tools: made } : {};
  }

  isTrusted(name) {
    return this.trusted.has(this.tools.get(name)?.key);
  }

  trust(name) {
    const key = this.tools.get(name)?.key;
    if (key) this.trusted.add(key);
  }

  // Runs a call the user has agreed to.
  async run({ name, arguments: text }, signal) {
    const found = this.tools.get(name);
    if (!found) return { text: `There is no tool ${name}.`, failed: true };
    let args;
    try {
      args = text.trim() ? JSON.parse(text) : {};
    } catch {
      return { text: "The arguments are not JSON.", failed: true };
    }
    try {
      return await found.entry.server.use(found.tool.name, args, signal);
    } catch (error) {
      return { text: error.message, failed: true };
    }
  }
}
