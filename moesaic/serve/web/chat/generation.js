// One response as it is generated: the stream of the server, taken into a message.

import { takeSources } from "./sources.js";

export class Generation {
  // `tokens` collects probabilities; `changed` is called after every piece, with its text.
  constructor(api, message, tokens, changed) {
    Object.assign(this, { api, message, tokens, changed });
    this.aborter = new AbortController();
    this.times = { sent: 0, first: null, last: null, tokens: 0 };
    this.reason = null;
  }

  stop() {
    this.aborter.abort();
  }

  async run(body) {
    const { message, times } = this;
    const { signal } = this.aborter;
    times.sent = performance.now();
    delete message.error;
    try {
      const sent = { ...body, stream: true, stream_options: { include_usage: true } };
      const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(sent), signal };
      const response = await this.api.request("/v1/chat/completions", options);
      message.ignored = response.headers.get("x-moesaic-ignored") ?? undefined;
      for await (const chunk of this.api.read(response)) {
        if (chunk.error) throw new Error(chunk.error.message);
        if (chunk.usage) {
          times.tokens = chunk.usage.completion_tokens;
          message.used = chunk.usage.prompt_tokens + chunk.usage.completion_tokens;
        }
        takeSources(message, chunk, chunk.choices?.[0]?.delta);
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        this.take(choice);
        this.reason = choice.finish_reason ?? this.reason;
      }
      if (!this.reason) throw new Error("The connection closed before the response was complete.");
    } catch (error) {
      if (signal.aborted) this.reason = "abort";
      else {
        message.error = error instanceof TypeError ? "The server cannot be reached." : error.message;
        message.errorCode = error.code;
      }
    }
    message.finish = this.reason;
    message.facts = facts(times, this.reason);
  }

  take({ delta = {}, logprobs }) {
    const { message, times } = this;
    for (const token of logprobs?.content ?? []) this.tokens.add(token);
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      times.last = performance.now();
      times.first ??= times.last;
    }
    if (delta.content) message.content += delta.content;
    if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
    for (const { index = 0, id, function: part = {} } of delta.tool_calls ?? []) {
      message.calls ??= [];
      const call = (message.calls[index] ??= { id: id ?? `call-${index}`, name: "", arguments: "" });
      call.name += part.name ?? "";
      call.arguments += part.arguments ?? "";
    }
    this.changed(delta.content ?? "");
  }
}

function facts({ sent, first, last, tokens }, reason) {
  const parts = [];
  if (tokens) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (first !== null) {
    const throughput = ((tokens - 1) * 1000) / (last - first);
    if (tokens > 1 && last > first) parts.push(`${throughput.toFixed(throughput < 100 ? 1 : 0)} tokens/s`);
    parts.push(`first token after ${((first - sent) / 1000).toFixed(2)} s`);
  }
  if (reason === "abort") parts.push("stopped");
  if (reason === "length") parts.push("max tokens reached");
  return parts.join(" · ");
}
