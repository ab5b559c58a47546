// How much of the model's context the conversation takes, counted by the server's own tokenizer and chat template.

const WARNS = 0.8; // of the context
const count = (number) => number.toLocaleString("en");

export class ContextMeter {
  constructor(api, models, toolbox, root) {
    Object.assign(this, { api, models, toolbox, root });
    this.counted = new Map(); // by what was sent; the last few
  }

  get limit() {
    return this.models.current?.max_model_len ?? null;
  }

  // The tokens of a prompt; null if the server does not say.
  count(messages) {
    return messages.length ? this.ask({ messages, ...this.toolbox.forRequest() }) : 0;
  }

  countText(prompt) {
    return this.ask({ prompt, add_special_tokens: false });
  }

  async ask(body) {
    const key = JSON.stringify([this.models.current?.id, body]);
    if (!this.counted.has(key)) {
      const asked = this.api.post("/tokenize", { model: this.models.current?.id, ...body }).then(
        (answer) => answer.count,
        // Too long to be tokenized is too long for the context too.
        (error) => (error.status === 413 ? Infinity : null),
      );
      this.counted.set(key, asked);
      if (this.counted.size > 24) this.counted.delete(this.counted.keys().next().value);
    }
    return this.counted.get(key);
  }

  // "fits", "near" or "over".
  state(used) {
    if (used === null || !this.limit) return "fits";
    return used >= this.limit ? "over" : used >= WARNS * this.limit ? "near" : "fits";
  }

  show(used) {
    const known = Boolean(used && this.limit);
    this.root.hidden = !known;
    if (!known) return;
    const bar = this.root.querySelector("meter");
    Object.assign(bar, { max: this.limit, high: WARNS * this.limit, value: Math.min(used, this.limit) });
    const shown = Number.isFinite(used) ? count(used) : `more than ${count(this.limit)}`;
    this.root.querySelector("span").textContent = `${shown} of ${count(this.limit)} tokens`;
    this.root.dataset.state = this.state(used);
    bar.setAttribute("aria-valuetext", `${shown} of ${count(this.limit)} tokens of context`);
  }
}
