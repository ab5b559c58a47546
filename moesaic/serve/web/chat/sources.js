// The passages an answer was drawn from, below it: those it cites first, with what they say, and the whole passage on demand.
// All of it is text of documents, and shown as text.

import { element } from "../element.js";

const words = (value) => (typeof value === "string" ? value : "");
const whole = (value) => (Number.isSafeInteger(value) ? value : 0);
const STATES = { true: "says so", false: "does not say so" };

// What a stream tells of sources, into the message that is kept.
export function takeSources(message, { search_results: found }, { annotations } = {}) {
  if (Array.isArray(found)) message.sources = found.map(source);
  if (Array.isArray(annotations)) message.citations = annotations.map((one) => citation(one?.url_citation ?? {}));
}

// Only what is shown, and only as what it is: a file that is imported may hold anything.
export function source({ number, title, url, snippet, base, start, end, page }) {
  const made = { number: whole(number), title: words(title), url: words(url), snippet: words(snippet), base: words(base) };
  return { ...made, start: whole(start), end: whole(end), ...(Number.isInteger(page) ? { page } : {}) };
}

export function citation({ number, start_index: start, end_index: end, quote, quote_start: from, quote_end: to, supported }) {
  const made = { number: whole(number), start_index: whole(start), end_index: whole(end), quote: words(quote) };
  return { ...made, quote_start: whole(from), quote_end: whole(to), supported: typeof supported === "boolean" ? supported : null };
}

export function sourceList({ sources = [], citations = [] }) {
  if (!sources.length) return null;
  const cited = sources.filter(({ number }) => citations.some((one) => one.number === number));
  const others = sources.filter((one) => !cited.includes(one));
  const parts = [element("h3", {}, cited.length ? `Sources (${cited.length} cited)` : "Found in the texts, not cited")];
  if (cited.length) parts.push(list(cited, citations));
  if (others.length) {
    const rest = list(others, []);
    parts.push(cited.length ? element("details", { class: "other-sources" }, element("summary", {}, `${others.length} more found`), rest) : rest);
  }
  return element("section", { class: "sources", "aria-label": "Sources" }, ...parts);
}

function list(sources, citations) {
  return element("ul", { role: "list" }, ...sources.map((one) => entry(one, citations.filter(({ number }) => number === one.number))));
}

function entry({ number, title, url, snippet, base, start, end, page }, citations) {
  const place = [url, page ? `page ${page}` : "", `characters ${start} to ${end}`, base].filter(Boolean).join(" · ");
  const head = element("p", { class: "source-head" }, element("span", { class: "number" }, `[${number}]`), " ", element("cite", {}, title || url), " ", element("span", { class: "hint" }, place));
  const quotes = new Map(citations.map((one) => [one.quote, one])); // one that is cited twice is shown once
  const said = [...quotes.values()].map(({ quote, supported }) => {
    const state = STATES[supported] ? element("span", { class: `verdict ${supported}` }, `The passage ${STATES[supported]}.`) : "";
    return element("blockquote", {}, element("q", {}, quote), " ", state);
  });
  const all = element("details", { class: "passage" }, element("summary", {}, "Passage"), element("pre", { tabindex: "0", "aria-label": `Passage ${number}: ${title}` }, ...marked(snippet, start, citations)));
  return element("li", { class: "source" }, head, ...said, all);
}

// The passage with what is quoted of it marked.
function marked(text, start, citations) {
  const spans = citations.map((one) => [one.quote_start - start, one.quote_end - start]).filter(([from, to]) => from >= 0 && to <= text.length && from < to);
  spans.sort((a, b) => a[0] - b[0]);
  const parts = [];
  let at = 0;
  for (const [from, to] of spans) {
    if (from < at) continue;
    parts.push(text.slice(at, from), element("mark", {}, text.slice(from, to)));
    at = to;
  }
  return [...parts, text.slice(at)];
}
