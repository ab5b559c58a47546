// Code in colours, by highlight.js: which part of a text is of which kind.

import hljs from "../vendor/highlight.js/highlight.min.js";

const MAX_LENGTH = 50_000; // beyond that, plain: colours are not worth a pause
const KINDS = {
  comment: "comment", quote: "comment", doctag: "comment", string: "string", regexp: "string", char: "string", number: "number",
  literal: "number", symbol: "number", keyword: "keyword", built_in: "call", type: "call", title: "call", name: "keyword",
  attr: "call", attribute: "call", property: "call", variable: "call", meta: "comment", selector: "keyword", section: "keyword",
  addition: "added", deletion: "removed",
};

// Collects ranges instead of markup; highlight.js calls it as it reads.
class Ranges {
  constructor() {
    this.ranges = []; // [from, to, kind]
    this.length = 0;
    this.open = [];
  }

  addText(text) {
    if (!text) return;
    const kind = this.open.findLast((one) => one) ?? null;
    const last = this.ranges.at(-1);
    if (last?.[2] === kind && last) last[1] += text.length;
    else this.ranges.push([this.length, this.length + text.length, kind]);
    this.length += text.length;
  }

  openNode(name) {
    this.open.push(KINDS[String(name).split(/[.-]/)[0]] ?? null);
  }

  closeNode() {
    this.open.pop();
  }

  startScope(name) {
    this.openNode(name);
  }

  endScope() {
    this.closeNode();
  }

  __addSublanguage(other) {
    for (const [from, to, kind] of other.ranges) this.ranges.push([this.length + from, this.length + to, kind]);
    this.length += other.length;
  }

  finalize() {}

  toHTML() {
    return "";
  }
}

hljs.configure({ __emitter: Ranges, throwUnescapedHTML: false });

// Calls emit(from, to, kind) for all of the text, in order; kind is null where there is nothing to colour.
export function highlight(text, language, emit) {
  if (!text) return;
  const known = text.length <= MAX_LENGTH && language && hljs.getLanguage(language);
  const read = known ? hljs.highlight(text, { language, ignoreIllegals: true })._emitter : null;
  const ranges = read?.length === text.length ? read.ranges : [[0, text.length, null]]; // no letter may be lost
  for (const [from, to, kind] of ranges) emit(from, to, kind);
}
