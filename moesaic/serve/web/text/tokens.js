// The tokens of a response: the probability of each, found again in the text that is shown, on a card beside it.

import { element } from "../element.js";

const STEPS = [0.05, 0.2, 0.4, 0.6, 0.8, 0.95]; // limits of the colors

export class Tokens {
  // `list` holds [text, logprob, [[text, logprob], ...]] for each token, as it is stored too.
  constructor(list = []) {
    this.clear();
    for (const entry of list) this.push(entry);
  }

  clear() {
    this.list = [];
    this.starts = [];
    this.text = "";
    this.decoder = new TextDecoder();
  }

  // A token as the API reports it. Some hold half a character: it shows with the token that completes it.
  add({ token, bytes, logprob, top_logprobs: others = [] }) {
    const text = bytes ? this.decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
    this.push([text, logprob, others.map((other) => [other.token, other.logprob])]);
  }

  push(entry) {
    this.list.push(entry);
    this.starts.push(this.text.length);
    this.text += entry[0];
  }

  // Where the shown text begins among the tokens, which may also hold reasoning and tags; below zero if it begins before
  // them, as that of an edited response that was continued; null if it is not there.
  offset(shown) {
    if (!shown || !this.text) return null;
    if (this.text.startsWith(shown)) return 0;
    const found = this.text.indexOf(shown, Math.max(0, this.text.indexOf("</think>")));
    if (found >= 0) return found;
    return shown.endsWith(this.text) ? this.text.length - shown.length : null;
  }

  // Wrap the text nodes of a block, token by token.
  wrap(block, offset) {
    if (offset === null) return;
    const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    const nodes = [];
    while (walker.nextNode()) if (walker.currentNode.at !== undefined) nodes.push(walker.currentNode);
    for (const node of nodes) {
      const from = node.at + offset;
      const to = from + node.data.length;
      const spans = [];
      if (from < 0) spans.push(node.data.slice(0, Math.min(-from, node.data.length)));
      for (let number = this.find(Math.max(0, from)); number < this.list.length && this.starts[number] < to; number++) {
        const [first, last] = [Math.max(from, this.starts[number]), Math.min(to, this.starts[number + 1] ?? this.text.length)];
        if (first >= last) continue;
        const text = node.data.slice(first - from, last - from);
        const likely = Math.exp(this.list[number][1]);
        const step = STEPS.findIndex((limit) => likely < limit);
        spans.push(element("span", { class: `token likely-${step < 0 ? STEPS.length : step}`, "data-token": number, tabindex: "-1" }, text));
      }
      if (spans.length) node.replaceWith(...spans);
    }
  }

  // The last token that begins at or before a place.
  find(place) {
    let [low, high] = [0, this.starts.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

const visible = (text) => text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";
const percent = (logprob) => {
  const share = Math.exp(logprob) * 100;
  if (share < 0.01) return "< 0.01 %";
  return share >= 99.95 ? "100 %" : `${share >= 9.95 ? share.toFixed(1) : share.toPrecision(2)} %`;
};

// Shows the card of whichever token is pointed at or has the focus. `tokensOf` finds the tokens of a span's message.
export function showTokenCards(messages, card, tokensOf) {
  let shown = null;

  const hide = () => {
    shown?.removeAttribute("aria-describedby");
    shown = null;
    card.hidden = true;
  };

  const show = (span) => {
    const entry = tokensOf(span)?.list[span.dataset.token];
    if (!entry || span === shown) return;
    hide();
    const [text, logprob, others] = entry;
    const rows = (others.length ? others : [[text, logprob]]).map(([other, its]) => {
      const chosen = other === text || its === logprob;
      const bar = element("span", { class: "amount", "aria-hidden": "true" });
      bar.style.setProperty("--share", Math.exp(its));
      return element("li", { class: chosen ? "chosen" : null }, element("span", { class: "what" }, visible(other)), bar, element("span", { class: "share" }, percent(its)));
    });
    card.replaceChildren(
      element("p", {}, element("code", {}, visible(text)), element("strong", {}, percent(logprob)), element("span", {}, `logprob ${logprob > -0.0005 ? "0" : logprob.toFixed(3).replace("-", "−")}`)),
      element("ol", {}, ...rows),
    );
    card.hidden = false;
    const word = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const { width, height } = card.getBoundingClientRect();
    const below = word.bottom + height + 12 < innerHeight;
    card.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, word.left))}px`;
    card.style.top = `${below ? word.bottom + 6 : Math.max(8, word.top - height - 6)}px`;
    span.setAttribute("aria-describedby", card.id);
    shown = span;
  };

  const tokenAt = (event) => event.target.closest?.(".token");
  messages.addEventListener("pointerover", (event) => (tokenAt(event) ? show(tokenAt(event)) : hide()));
  messages.addEventListener("pointerleave", hide);
  messages.addEventListener("focusin", (event) => (tokenAt(event) ? show(tokenAt(event)) : hide()));
  messages.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, true);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  // A response is one stop of the Tab key; the arrows go from token to token within it.
  messages.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const body = event.target.closest?.(".body");
    if (!step || !body || event.target.closest("pre, .table, textarea, summary")) return;
    const spans = [...body.querySelectorAll(".token")];
    const next = spans[event.target.matches(".token") ? spans.indexOf(event.target) + step : 0];
    if (next) {
      event.preventDefault();
      next.focus();
    }
  });
}
