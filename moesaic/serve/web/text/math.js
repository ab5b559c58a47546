// Formulas for markdown-it and KaTeX: \( \), \[ \], $ $ and $$ $$.
//
// A single $ is money unless it hugs what it encloses: none after the opening one, none before the closing one, no digit
// after that (as pandoc reads it).

import "../vendor/katex/katex.min.js"; // has no exports: it sets globalThis.katex
import { element } from "../element.js";

const { katex } = globalThis;
const CLOSES = { "\\(": "\\)", "\\[": "\\]", $$: "$$", $: "$" };
const LONGEST = 10_000; // characters of one formula

export function mathRules(parser) {
  parser.inline.ruler.before("escape", "math", inlineMath);
  parser.block.ruler.before("fence", "math_block", blockMath, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

function inlineMath(state, silent) {
  const { src, pos, posMax } = state;
  if (src[pos] !== "$" && src[pos] !== "\\") return false;
  const open = src.startsWith("$$", pos) ? "$$" : src[pos] === "$" ? "$" : src.slice(pos, pos + 2);
  if (!CLOSES[open]) return false;
  const begin = pos + open.length;
  if (open === "$" && (/\s|\$/.test(src[begin] ?? " ") || src[pos - 1] === "$")) return false;
  const end = closing(state, open, begin);
  if (end < 0 || end + CLOSES[open].length > posMax || !src.slice(begin, end).trim()) return false;
  if (!silent) {
    const token = state.push("math_inline", "", 0);
    token.content = src.slice(begin, end);
    token.markup = open;
  }
  state.pos = end + CLOSES[open].length;
  return true;
}

// Where the formula ends. That there is no end is noted, or a text full of dollars would take forever.
function closing(state, open, begin) {
  const missing = (state.env.missingMath ??= {});
  const key = `${open}${state.src.length}`;
  if (missing[key] <= begin) return -1;
  const close = CLOSES[open];
  for (let at = state.src.indexOf(close, begin); at >= 0 && at - begin < LONGEST; at = state.src.indexOf(close, at + 1)) {
    let slashes = 0;
    while (state.src[at - 1 - slashes] === "\\") slashes++;
    if (open[0] === "$" && slashes % 2) continue;
    if (open === "$" && (/\s/.test(state.src[at - 1]) || /\d/.test(state.src[at + 1] ?? ""))) return -1; // money
    return at;
  }
  missing[key] = begin;
  return -1;
}

// A formula of its own, over several lines: the first begins with $$ or \[, the last ends with its counterpart.
function blockMath(state, startLine, endLine, silent) {
  const lineOf = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
  if (state.sCount[startLine] - state.blkIndent >= 4) return false;
  const first = lineOf(startLine);
  const open = ["$$", "\\["].find((mark) => first.startsWith(mark));
  if (!open) return false;
  const close = CLOSES[open];
  const closes = (text) => text.trimEnd().endsWith(close);
  const rest = first.slice(open.length);
  let last = startLine;
  if (closes(rest)) {
    if (rest.indexOf(close) !== rest.trimEnd().length - close.length) return false; // two formulas in one line
  } else {
    if (rest.includes(close)) return false; // text goes on after it: part of a paragraph
    do last++;
    while (last < endLine && state.sCount[last] >= state.blkIndent && !closes(lineOf(last)) && last - startLine < 400);
    if (last >= endLine || !closes(lineOf(last))) return false;
  }
  if (silent) return true;
  const lines = [];
  for (let line = startLine; line <= last; line++) lines.push(lineOf(line).trimEnd());
  const token = state.push("math_block", "", 0);
  token.content = lines.join("\n").slice(open.length, -close.length);
  token.map = [startLine, last + 1];
  token.markup = open;
  state.line = last + 1;
  return true;
}

// A formula as an element; what KaTeX cannot read stands as it was written.
export function formula(tex, markup) {
  const display = markup === "$$" || markup === "\\[";
  const made = element("span", { class: display ? "math display" : "math", tabindex: display ? "0" : null });
  const options = { displayMode: display, throwOnError: true, strict: "ignore", trust: false, maxSize: 30, maxExpand: 300 };
  try {
    const tree = katex.__renderToDomTree(tex, options);
    withoutStyleAttributes(tree);
    made.append(tree.toNode());
  } catch {
    made.classList.add("unread");
    made.append(`${markup}${tex}${CLOSES[markup]}`);
  }
  return made;
}

// The page's content security policy allows no style attributes; the same styles set by script are fine.
function withoutStyleAttributes(node) {
  for (const child of node.children ?? []) withoutStyleAttributes(child);
  const style = node.attributes?.style;
  if (!style) return;
  const attributes = { ...node.attributes };
  delete attributes.style;
  node.attributes = attributes;
  const { toNode } = node;
  node.toNode = () => {
    const made = toNode.call(node);
    made.style.cssText = style;
    return made;
  };
}
