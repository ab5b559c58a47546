// Colours for code: comments, strings, numbers and keywords, which is enough to read by and needs no grammar.

const WORDS = {
  python:
    "and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield None True False self",
  script:
    "async await break case catch class const continue default delete do else enum export extends finally for from function if implements import in instanceof interface let new of return static super switch this throw try type typeof var void while yield null undefined true false",
  c: "auto bool break case catch char class const constexpr continue default delete do double else enum extern fn final float for func go if impl import in inline int interface let long loop match mod mut namespace new nil null nullptr package private protected pub public range return self short signed sizeof static struct super switch template this throw trait try type typedef union unsigned use using var virtual void volatile while where true false",
  shell: "case do done elif else esac export fi for function if in local return set then until while cd echo sudo",
  sql: "select from where group by having order limit offset insert into values update set delete create table index view join left right inner outer full on as and or not null is in distinct union all case when then else end primary key",
  data: "true false null yes no on off",
};
const STRINGS = String.raw`"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?`;
const LONG = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|`;
const HASH = String.raw`#[^\n]*`;
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;
const DASHES = String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|$)`;

const rules = (comment, strings, words, flags = "") => ({ comment, strings, words: new Set(words.split(" ")), flags });
const PYTHON = rules(HASH, LONG + STRINGS, WORDS.python);
const SCRIPT = rules(SLASHES, STRINGS + "|`(?:[^`\\\\]|\\\\.)*`?", WORDS.script);
const C = rules(SLASHES, STRINGS, WORDS.c);
const SHELL = rules(String.raw`(?<=^|\s)#[^\n]*`, STRINGS, WORDS.shell, "m");
const SQL = rules(DASHES, STRINGS, WORDS.sql, "i");
const DATA = rules(HASH, STRINGS, WORDS.data);
const LANGUAGES = {
  python: PYTHON, py: PYTHON, javascript: SCRIPT, js: SCRIPT, jsx: SCRIPT, typescript: SCRIPT, ts: SCRIPT, tsx: SCRIPT,
  c: C, cpp: C, "c++": C, cs: C, csharp: C, java: C, go: C, rust: C, rs: C, swift: C, kotlin: C, cuda: C, css: C,
  bash: SHELL, sh: SHELL, shell: SHELL, zsh: SHELL, sql: SQL, json: DATA, yaml: DATA, yml: DATA, toml: DATA,
};
const MAX_LENGTH = 50_000; // beyond that, plain: colours are not worth a pause

// Calls emit(from, to, kind) for all of the text, in order; kind is null where there is nothing to colour.
export function highlight(text, language, emit) {
  const rule = Object.hasOwn(LANGUAGES, language.toLowerCase()) ? LANGUAGES[language.toLowerCase()] : null;
  if (!rule || text.length > MAX_LENGTH) {
    if (text) emit(0, text.length, null);
    return;
  }
  const number = String.raw`\b(?:0[xX][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;
  const parts = `(?<comment>${rule.comment})|(?<string>${rule.strings})|(?<number>${number})|(?<word>[A-Za-z_]\\w*)`;
  let done = 0;
  for (const match of text.matchAll(new RegExp(parts, `g${rule.flags}`))) {
    const { comment, string, number, word } = match.groups;
    const known = word !== undefined && rule.words.has(rule.flags.includes("i") ? word.toLowerCase() : word);
    const called = word !== undefined && !known && text[match.index + word.length] === "(";
    const kind = comment !== undefined ? "comment" : string !== undefined ? "string" : number !== undefined ? "number" : known ? "keyword" : called ? "call" : null;
    if (!kind || !match[0]) continue;
    if (match.index > done) emit(done, match.index, null);
    done = match.index + match[0].length;
    emit(match.index, done, kind);
  }
  if (done < text.length) emit(done, text.length, null);
}
