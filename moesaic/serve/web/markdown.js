// Markdown to elements, for text nobody vouches for: every character ends in a text node, links go only to http, https and
// mail addresses, and pictures are shown as links, since fetching one would tell a stranger what was written.
//
// Each text node carries, as `at`, where in the source it came from, so that tokens can be found again in what is shown.

import { element } from "./element.js";
import { highlight } from "./highlight.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const TABLE = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const DEEPEST = 8; // quotes and lists within each other

// Show `source` in `container`. Blocks that are as they were are left alone, so that a growing response costs little and
// a selection in it survives. `finish` is called with every new block.
export function render(container, source, finish = () => {}) {
  const before = container.shown ?? [];
  const shown = blocks(linesOf(source), 0).map((block, number) => {
    const first = block.lines[0].at;
    const last = block.lines.at(-1);
    const text = source.slice(first, last.at + last.text.length);
    const old = before[number];
    if (old && old.text === text && old.first === first && old.kind === block.kind) return old;
    const node = block.build();
    finish(node);
    if (old) old.node.replaceWith(node);
    else container.append(node);
    return { text, first, kind: block.kind, node };
  });
  for (const old of before.slice(shown.length)) old.node.remove();
  container.shown = shown;
}

function linesOf(source) {
  const lines = [];
  let at = 0;
  for (const text of source.split("\n")) {
    lines.push({ text: text.replace(/\r$/, ""), at });
    at += text.length + 1;
  }
  return lines;
}

const after = (line, count) => ({ text: line.text.slice(count), at: line.at + Math.min(count, line.text.length) });
const indent = (line) => columns(/^[ \t]*/.exec(line.text)[0]);
const blank = (line) => !line.text.trim();
const beginsBlock = (line) => [FENCE, HEADING, RULE, QUOTE].some((kind) => kind.test(line.text)) || beginsItem(line);

// How wide some white space is, and a line without so many columns of it.
function columns(space) {
  return space.replace(/\t/g, "    ").length;
}

function dedent(line, width) {
  let count = 0;
  while (count < line.text.length && " \t".includes(line.text[count]) && columns(line.text.slice(0, count)) < width) count++;
  return after(line, count);
}

// A paragraph is broken by an item only if it could not be a number at the beginning of a line.
const beginsItem = (line) => /^ {0,3}(?:[-*+]|1[.)]) +\S/.test(line.text);

// The blocks some lines hold, each with its lines and a function that builds it.
function blocks(lines, depth) {
  const found = [];
  let next = 0;
  const take = (kind, until, build) => {
    found.push({ kind, lines: lines.slice(next, until), build });
    next = until;
  };
  while (next < lines.length) {
    const line = lines[next];
    let match;
    if (blank(line)) next++;
    else if ((match = FENCE.exec(line.text))) takeCode(lines, next, match, take);
    else if ((match = HEADING.exec(line.text))) {
      const level = Math.min(match[1].length + 2, 6); // the page has its own h1 and h2
      const text = after(line, match[0].length);
      text.text = text.text.replace(/[ \t]+#*[ \t]*$/, "");
      take("heading", next + 1, () => inline(element(`h${level}`), [text]));
    } else if (RULE.test(line.text)) take("rule", next + 1, () => element("hr"));
    else if (depth < DEEPEST && QUOTE.test(line.text)) takeQuote(lines, next, depth, take);
    else if (depth < DEEPEST && ITEM.test(line.text)) takeList(lines, next, depth, take);
    else if (line.text.includes("|") && TABLE.test(lines[next + 1]?.text ?? "")) takeTable(lines, next, take);
    else {
      let until = next + 1;
      while (until < lines.length && !blank(lines[until]) && !beginsBlock(lines[until])) until++;
      const text = lines.slice(next, until).map((one) => dedent(one, Infinity));
      take("paragraph", until, () => inline(element("p"), text));
    }
  }
  return found;
}

function build(lines, depth, parent) {
  for (const block of blocks(lines, depth)) parent.append(block.build());
  return parent;
}

function takeCode(lines, first, [, fence, language], take) {
  let until = first + 1;
  const closes = (text) => new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},} *$`).test(text);
  while (until < lines.length && !closes(lines[until].text)) until++;
  const code = lines.slice(first + 1, until).map((line) => dedent(line, indent(lines[first])));
  take("code", Math.min(until + 1, lines.length), () => codeBlock(code, language));
}

function codeBlock(lines, language) {
  const label = element("span", { class: "language" }, language || "text");
  const copy = element("button", { type: "button", class: "quiet copy-code" }, "Copy");
  const code = element("code");
  const whole = joined(lines);
  highlight(whole.text, language, (from, to, kind) => {
    emit(kind ? code.appendChild(element("span", { class: `code-${kind}` })) : code, whole, from, to);
  });
  return element("figure", { class: "code" }, element("figcaption", {}, label, copy), element("pre", { tabindex: "0" }, code));
}

function takeQuote(lines, first, depth, take) {
  let until = first;
  while (until < lines.length && (QUOTE.test(lines[until].text) || (!blank(lines[until]) && !beginsBlock(lines[until])))) until++;
  const inner = lines.slice(first, until).map((line) => after(line, (QUOTE.exec(line.text) ?? [""])[0].length));
  take("quote", until, () => build(inner, depth + 1, element("blockquote")));
}

function takeList(lines, first, depth, take) {
  const [, before, mark] = ITEM.exec(lines[first].text);
  const ordered = /\d/.test(mark);
  const items = [];
  let until = first;
  let loose = false;
  while (until < lines.length) {
    const match = ITEM.exec(lines[until].text);
    if (!match || match[2].at(-1) !== mark.at(-1) || columns(match[1]) > columns(before) + 3 || RULE.test(lines[until].text)) break;
    const begins = columns(match[1]);
    const width = begins + match[2].length + Math.min(Math.max(match[3].length, 1), 4);
    const item = [after(lines[until], match[0].length)];
    until++;
    while (until < lines.length) {
      const line = lines[until];
      const inside = indent(line);
      if (blank(line)) {
        // A blank line belongs to the list if more of it follows.
        const following = lines.slice(until).find((one) => !blank(one));
        const more = following && (indent(following) >= width || ITEM.test(following.text));
        if (!more) break;
        loose = true;
        item.push(after(line, line.text.length));
      } else if (inside >= width || inside > begins + (ITEM.test(line.text) ? 1 : 0)) item.push(dedent(line, width));
      else if (!ITEM.test(line.text) && !beginsBlock(line) && !blank(lines[until - 1])) item.push(line);
      else break;
      until++;
    }
    items.push(item);
  }
  const number = ordered ? parseInt(mark, 10) : 1;
  take("list", until, () => {
    const list = element(ordered ? "ol" : "ul", { class: loose ? "loose" : null, start: number !== 1 ? number : null });
    for (const item of items) list.append(listItem(item, depth));
    return list;
  });
}

function listItem(lines, depth) {
  const made = element("li");
  const task = /^\[([ xX])\] /.exec(lines[0].text);
  if (task) {
    made.className = "task";
    made.append(element("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": "done" }));
    lines = [after(lines[0], 4), ...lines.slice(1)];
  }
  return build(lines, depth + 1, made);
}

function takeTable(lines, first, take) {
  let until = first + 2;
  while (until < lines.length && lines[until].text.includes("|") && !blank(lines[until])) until++;
  const sides = cells(lines[first + 1]).map(({ text }) => {
    const mark = text.trim();
    return mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : null;
  });
  const rows = lines.slice(first, until).filter((_, number) => number !== 1);
  take("table", until, () => {
    const [head, ...rest] = rows.map((line, number) => {
      const made = cells(line).map((cell, column) =>
        inline(element(number ? "td" : "th", { class: sides[column] ?? null, scope: number ? null : "col" }), [cell]),
      );
      return element("tr", {}, ...made.slice(0, sides.length));
    });
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rest));
    return element("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, table);
  });
}

function cells(line) {
  const found = [];
  let from = /^ *\|?/.exec(line.text)[0].length;
  for (let place = from; place <= line.text.length; place++) {
    const ends = place === line.text.length;
    if (!ends && (line.text[place] !== "|" || line.text[place - 1] === "\\")) continue;
    const text = line.text.slice(from, place);
    if (!ends || text.trim()) {
      const lead = text.length - text.trimStart().length;
      found.push({ text: text.trim(), at: line.at + from + lead });
    }
    from = place + 1;
  }
  return found;
}

// Lines as one text, with the way back to where each character was.
function joined(lines) {
  const starts = [];
  let length = 0;
  for (const line of lines) {
    starts.push(length);
    length += line.text.length + 1;
  }
  return { text: lines.map((line) => line.text).join("\n"), lines, starts };
}

// Append a part of a joined text, line by line, since only within a line are its characters neighbours in the source.
function emit(parent, whole, from, to) {
  let line = 0;
  let high = whole.starts.length - 1;
  while (line < high) {
    const middle = (line + high + 1) >> 1;
    if (whole.starts[middle] <= from) line = middle;
    else high = middle - 1;
  }
  while (from < to) {
    const end = Math.min(to, whole.starts[line + 1] ?? Infinity);
    const node = document.createTextNode(whole.text.slice(from, end));
    node.at = whole.lines[line].at + from - whole.starts[line];
    parent.append(node);
    from = end;
    line++;
  }
}

const LINK = /(!?)\[((?:[^[\]\\]|\\.)*)\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/y;
const ADDRESS = /<?(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*_~])>?/y;
const SPECIAL = /[\\`*_~[!<h&]/g;
const ENTITY = /&(amp|lt|gt|quot|apos|nbsp|ndash|mdash|hellip|times);/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", ndash: "–", mdash: "—", hellip: "…", times: "×" };
const STYLES = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };
const wordy = (character) => /[\p{L}\p{N}]/u.test(character ?? "");
const sign = (character) => /[\p{P}\p{S}]/u.test(character ?? "");

function inline(parent, lines) {
  const whole = joined(lines);
  spans(parent, whole, 0, whole.text.length, {});
  return parent;
}

// One pass over text[from, to); what opens a style is matched with the next thing that closes it.
function spans(parent, whole, from, to, missing) {
  const { text } = whole;
  let done = from;
  let place = from;
  const jump = (node, end, inner) => {
    emit(parent, whole, done, place);
    if (inner) inner(node);
    parent.append(node);
    done = place = end;
  };
  while (place < to) {
    SPECIAL.lastIndex = place;
    const next = SPECIAL.exec(text);
    if (!next || next.index >= to) break;
    place = next.index;
    const character = text[place];
    if (character === "\\" && /[!-/:-@[-`{-~]/.test(text[place + 1] ?? "")) {
      emit(parent, whole, done, place);
      done = place + 1;
      place += 2;
    } else if (character === "&") {
      ENTITY.lastIndex = place;
      const match = ENTITY.exec(text);
      if (match) jump(document.createTextNode(ENTITIES[match[1]]), place + match[0].length);
      else place++;
    } else if (character === "`") {
      const ticks = /`+/y;
      ticks.lastIndex = place;
      const mark = ticks.exec(text)[0];
      const end = closing(text, mark, place + mark.length, to, missing, (at) => text[at - 1] !== "`" && text[at + mark.length] !== "`");
      if (end < 0) place += mark.length;
      else {
        let [first, last] = [place + mark.length, end];
        if (last - first > 2 && text[first] === " " && text[last - 1] === " ") [first, last] = [first + 1, last - 1];
        jump(element("code"), end + mark.length, (node) => emit(node, whole, first, last));
      }
    } else if (character === "[" || character === "!") {
      LINK.lastIndex = place;
      const match = LINK.exec(text);
      const address = match && place + match[0].length <= to ? safe(match[3]) : null;
      if (!address) place++;
      else {
        const first = place + match[1].length + 1;
        const node = anchor(address);
        if (match[1]) node.append("Picture: ");
        jump(node, place + match[0].length, () => spans(node, whole, first, first + match[2].length, {}));
      }
    } else if (character === "<" || character === "h") {
      ADDRESS.lastIndex = place;
      const match = wordy(text[place - 1]) ? null : ADDRESS.exec(text);
      const address = match && place + match[0].length <= to ? safe(match[1]) : null;
      if (!address) place++;
      else {
        const first = place + match[0].indexOf("h");
        jump(anchor(address), place + match[0].length, (node) => emit(node, whole, first, first + match[1].length));
      }
    } else {
      const mark = STYLES[text.slice(place, place + 2)] ? text.slice(place, place + 2) : character;
      const [previous, following] = [text[place - 1], text[place + mark.length] ?? " "];
      const opens = STYLES[mark] && /\S/.test(following) && !(wordy(previous) && (mark[0] === "_" || sign(following)));
      const fits = (at) =>
        /[^\s\\]/.test(text[at - 1]) &&
        !(wordy(text[at + mark.length]) && (mark[0] === "_" || sign(text[at - 1]))) &&
        (mark.length === 2 || (text[at + 1] !== mark && text[at - 1] !== mark));
      const end = opens ? closing(text, mark, place + mark.length + 1, to, missing, fits) : -1;
      if (end < 0) place += mark.length;
      else jump(element(STYLES[mark]), end + mark.length, (node) => spans(node, whole, place + mark.length, end, {}));
    }
  }
  emit(parent, whole, done, to);
}

// Where the next mark is that fits. That there is none is noted, or a text full of openings would take forever.
function closing(text, mark, from, to, missing, fits) {
  if (missing[mark] <= from) return -1;
  for (let at = text.indexOf(mark, from); at >= 0 && at + mark.length <= to; at = text.indexOf(mark, at + 1)) {
    if (fits(at)) return at;
  }
  missing[mark] = from;
  return -1;
}

function anchor(href) {
  return element("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" });
}

function safe(address) {
  return /^(?:https?:\/\/|mailto:)[^\s]+$/i.test(address) && URL.canParse(address) ? address : null;
}
