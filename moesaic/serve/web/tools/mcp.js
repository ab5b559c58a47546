// A client of one MCP server over streamable HTTP: its tools, and calls of them. What the server says is data: it is shown
// as text and given to the model as a tool's result, and nothing in it is followed here.

import { readEvents } from "../api.js";

const PROTOCOL = "2025-06-18";
const SECONDS = 60; // for one answer
const MOST_TOOLS = 200;
const LONGEST = 100_000; // characters of a result

export class McpServer {
  // `key` is sent to our own server only, which may require it.
  constructor(url, key = () => null) {
    this.url = url;
    this.key = key;
    this.name = new URL(url).host;
    this.tools = [];
    this.session = null;
    this.version = null;
    this.number = 0;
  }

  async connect() {
    const { serverInfo, protocolVersion } = await this.call("initialize", {
      protocolVersion: PROTOCOL,
      capabilities: {},
      clientInfo: { name: "moesaic", version: "1" },
    });
    this.version = String(protocolVersion ?? PROTOCOL);
    if (serverInfo?.name) this.name = String(serverInfo.title ?? serverInfo.name).slice(0, 80);
    await this.post({ jsonrpc: "2.0", method: "notifications/initialized" });
    this.tools = await this.listTools();
  }

  async listTools() {
    const found = [];
    let cursor;
    do {
      const { tools = [], nextCursor } = await this.call("tools/list", cursor ? { cursor } : {});
      found.push(...tools.filter((tool) => typeof tool?.name === "string"));
      cursor = nextCursor;
    } while (cursor && found.length < MOST_TOOLS);
    return found.slice(0, MOST_TOOLS).map(({ name, description, inputSchema, annotations }) => ({
      name,
      description: String(description ?? ""),
      parameters: inputSchema && typeof inputSchema === "object" ? inputSchema : { type: "object", properties: {} },
      readOnly: annotations?.readOnlyHint === true,
    }));
  }

  // A tool's result as text. An error the tool reports is a result too, which the model should see.
  async use(name, args, signal) {
    const result = await this.call("tools/call", { name, arguments: args }, signal);
    const texts = (result.content ?? []).map((part) => {
      if (part.type === "text") return String(part.text ?? "");
      if (part.type === "resource" && typeof part.resource?.text === "string") return part.resource.text;
      return `[${part.type ?? "something"} that cannot be shown as text]`;
    });
    if (!texts.length && result.structuredContent !== undefined) texts.push(JSON.stringify(result.structuredContent));
    const text = texts.join("\n");
    const shown = text.length > LONGEST ? `${text.slice(0, LONGEST)}\n[the rest, ${text.length - LONGEST} characters, is left out]` : text;
    return { text: shown, failed: result.isError === true };
  }

  async call(method, params, signal) {
    const id = ++this.number;
    const response = await this.post({ jsonrpc: "2.0", id, method, params }, signal);
    this.session ??= response.headers.get("mcp-session-id");
    const reply = await answer(response, id);
    if (reply.error) throw new Error(String(reply.error.message ?? "The MCP server reported an error."));
    return reply.result ?? {};
  }

  async post(message, signal) {
    const limit = AbortSignal.timeout(SECONDS * 1000);
    const headers = { "Content-Type": "application/json", Accept: "application/json, text/event-stream" };
    const key = new URL(this.url).origin === location.origin ? this.key() : null;
    if (key) headers.Authorization = `Bearer ${key}`;
    if (this.session) headers["Mcp-Session-Id"] = this.session;
    if (this.version) headers["MCP-Protocol-Version"] = this.version;
    let response;
    try {
      response = await fetch(this.url, {
        method: "POST",
        headers,
        body: JSON.stringify(message),
        credentials: "omit",
        referrerPolicy: "no-referrer",
        redirect: "error", // elsewhere nobody has consented to
        signal: signal ? AbortSignal.any([signal, limit]) : limit,
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      if (limit.aborted) throw new Error(`${this.name} did not answer within ${SECONDS} s.`, { cause: error });
      throw new Error(`${this.name} cannot be reached; it must also allow this page's origin (CORS).`, { cause: error });
    }
    if (!response.ok) throw new Error(`${this.name} responded with ${response.status}.`);
    return response;
  }
}

// The response to a request, from JSON or from a stream that may hold notifications before it.
async function answer(response, id) {
  if (!response.headers.get("content-type")?.includes("event-stream")) return response.json();
  for await (const message of readEvents(response.body)) if (message.id === id) return message;
  throw new Error("The MCP server closed the stream without an answer.");
}
