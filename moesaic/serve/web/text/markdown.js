// Markdown to elements, by markdown-it, for text nobody vouches for: every character ends in a text node, links go only to
// http, https and mail addresses, and pictures are shown as links, since fetching one would tell a stranger what was written.
//
// Each text node carries, as `at`, where in the source it came from, so that tokens can be found again in what is shown.

import MarkdownIt from "../vendor/markdown-it/markdown-it.min.js";
import { element } from "../element.js";
import { highlight } from "./highlight.js";
import { formula, mathRules } from "./math.js";

const parser = new MarkdownIt({ html: false, linkify: true });
parser.validateLink = (address) => /^(?:https?:\/\/|mailto:)[^\s]+$/i.test(address) && URL.canParse(address);
parser.use(mathRules);

// Show `source` in `container`. Blocks that are as they were are left alone, so that a growing response costs little and
// a selection in it survives. `finish` is called with every new block.
export function render(container, source, finish = () => {}) {
  // As markdown-it wants it, without moving any character.
  const text = source.replace(/\r\n/g, " \n").replace(/\r/g, "\n").replace(/\0/g, "\ufffd");
  const lines = starts(text);
  const env = {};
  const tokens = [];
  parser.block.parse(text, parser, env, tokens);
  const references = Object.keys(env.references ?? {}).join("\n");
  const before = container.references === references ? (container.shown ?? []) : [];
  if (!before.length) container.replaceChildren();
  const shown = blocks(tokens).map((block, number) => {
    const [first, last] = block[0].map;
    const [from, to] = [lines[first], lines[last] ?? text.length];
    const old = before[number];
    const key = `${block[0].type}${text.slice(from, to)}`;
    if (old && old.key === key && old.from === from) return old;
    const node = new Builder(text, lines, from, to, env).block(block);
    finish(node);
    if (old) old.node.replaceWith(node);
    else container.append(node);
    return { key, from, node };
  });
  for (const old of before.slice(shown.length)) old.node.remove();
  Object.assign(container, { shown, references });
}

function starts(text) {
  const found = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) found.push(at + 1);
  return found;
}

// The tokens of each block that stands in no other.
function blocks(tokens) {
  const found = [];
  let begin = 0;
  let depth = 0;
  tokens.forEach((token, place) => {
    depth += token.nesting;
    if (depth) return;
    found.push(tokens.slice(begin, place + 1));
    begin = place + 1;
  });
  return found;
}

const PLAIN = { paragraph: "p", blockquote: "blockquote", bullet_list: "ul", list_item: "li", thead: "thead", tbody: "tbody", tr: "tr", strong: "strong", em: "em", s: "del" };

class Builder {
  constructor(text, lines, from, to, env) {
    Object.assign(this, { text, lines, env });
    this.cursor = from; // what was found so far ends here
    this.to = to;
  }

  block(tokens) {
    const holder = document.createDocumentFragment();
    this.fill(holder, tokens);
    return holder.firstElementChild ?? element("p");
  }

  fill(parent, tokens) {
    const open = [parent];
    for (const token of tokens) {
      const into = open.at(-1);
      if (token.nesting < 0) {
        if (!token.hidden) open.pop();
      } else if (token.nesting > 0) {
        if (token.hidden) continue; // a paragraph of a tight list
        const made = this.container(token, into);
        open.push(made);
      } else this.leaf(token, into);
    }
  }

  container(token, parent) {
    const name = token.type.replace(/_open$/, "");
    let made;
    if (name === "heading") made = element(`h${Math.min(Number(token.tag[1]) + 2, 6)}`); // the page has its own h1 and h2
    else if (name === "ordered_list") made = element("ol", { start: token.attrGet("start") });
    else if (name === "link") made = anchor(token.attrGet("href"));
    else if (name === "th" || name === "td") made = element(name, { class: side(token), scope: name === "th" ? "col" : null });
    else if (name === "table") {
      made = element("table");
      parent.append(element("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, made));
      return made;
    } else made = element(PLAIN[name] ?? "span");
    if (name === "paragraph" && parent.localName === "li") parent.parentElement.classList.add("loose");
    parent.append(made);
    return made;
  }

  leaf(token, parent) {
    if (token.type === "inline") this.inline(token, parent);
    else if (token.type === "hr") parent.append(element("hr"));
    else if (token.type === "fence") parent.append(this.code(token, token.info.trim().split(/\s+/)[0], token.map[0] + 1));
    else if (token.type === "code_block") parent.append(this.code(token, "", token.map[0]));
    else if (token.type === "math_block") parent.append(formula(token.content, token.markup));
    else this.words(parent, token.content);
  }

  inline(token, parent) {
    if (token.map) this.cursor = Math.max(this.cursor, this.lines[token.map[0]]);
    let { content } = token;
    const item = parent.closest?.("li");
    const task = item && !item.textContent && /^\[([ xX])\] (?=\S)/.exec(content);
    if (task) {
      item.className = "task";
      item.prepend(element("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": "done" }));
      content = content.slice(4);
      this.cursor = this.text.indexOf("]", this.cursor) + 1;
    }
    const children = [];
    parser.inline.parse(content, parser, this.env, children);
    this.spans(parent, children);
  }

  spans(parent, tokens) {
    const open = [parent];
    for (const token of tokens) {
      const into = open.at(-1);
      if (token.type === "text") this.words(into, token.content);
      else if (token.type === "text_special") this.special(into, token);
      else if (token.type === "softbreak" || token.type === "hardbreak") this.words(into, "\n");
      else if (token.type === "code_inline") this.words(into.appendChild(element("code")), token.content);
      else if (token.type === "math_inline") into.append(formula(token.content, token.markup));
      else if (token.type === "image") {
        const made = into.appendChild(anchor(token.attrGet("src")));
        made.append("Picture: ");
        this.spans(made, token.children ?? []);
      } else if (token.nesting > 0) open.push(this.container(token, into));
      else if (token.nesting < 0) open.pop();
      else this.words(into, token.content);
    }
  }

  // An escaped character, or an entity: shown as one thing, written as another.
  special(parent, { content, markup }) {
    const place = this.find(markup);
    const node = parent.appendChild(document.createTextNode(content));
    if (place >= 0 && markup.endsWith(content)) node.at = place + markup.length - content.length;
  }

  words(parent, words) {
    if (!words) return;
    const place = this.find(words);
    const node = parent.appendChild(document.createTextNode(words));
    if (place >= 0) node.at = place;
  }

  // Where in the block some words are, at or after the last that were found.
  find(words) {
    const place = this.text.indexOf(words, this.cursor);
    if (place < 0 || place + words.length > this.to) return -1;
    this.cursor = place + words.length;
    return place;
  }

  code(token, language, firstLine) {
    const text = token.content.replace(/\n$/, "");
    const code = element("code");
    let line = 0;
    let begin = 0; // of the line, in the text
    const rows = text.split("\n");
    const emit = (parent, from, to) => {
      while (from < to) {
        while (from >= begin + rows[line].length + 1) begin += rows[line++].length + 1;
        const end = Math.min(to, begin + rows[line].length + 1);
        const node = parent.appendChild(document.createTextNode(text.slice(from, end)));
        const at = this.lines[firstLine + line] + this.lineLength(firstLine + line) - rows[line].length;
        if (this.text.startsWith(rows[line], at)) node.at = at + from - begin;
        from = end;
      }
    };
    highlight(text, language.toLowerCase(), (from, to, kind) => {
      emit(kind ? code.appendChild(element("span", { class: `code-${kind}` })) : code, from, to);
    });
    this.cursor = Math.min(this.to, this.lines[token.map[1]] ?? this.to);
    const label = element("span", { class: "language" }, language || "text");
    const copy = element("button", { type: "button", class: "quiet copy-code", "aria-label": `Copy the ${language || "text"} block` }, "Copy");
    const body = element("pre", { tabindex: "0", "aria-label": `Code: ${language || "text"}` }, code);
    return element("figure", { class: "code" }, element("figcaption", {}, label, copy), body);
  }

  lineLength(number) {
    return (this.lines[number + 1] ?? this.text.length + 1) - 1 - this.lines[number];
  }
}

function side(token) {
  return /text-align:(right|center)/.exec(token.attrGet("style") ?? "")?.[1] ?? null;
}

function anchor(href) {
  return element("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" });
}
