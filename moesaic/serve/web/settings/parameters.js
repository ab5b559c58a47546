// The sampling parameters the page offers: name as in the API, range, and what each does in one line.
//
// `main` ones are in view, the others folded; null is "off" or "the model's own", and is not sent. One that this server does
// not take is not shown.

export const PARAMETERS = [
  { name: "temperature", label: "Temperature", slide: true, min: 0, max: 2, step: 0.05, value: 0.7, main: true, hint: "0 always takes the likeliest token; higher is more varied." },
  { name: "top_p", label: "Top-p", slide: true, min: 0.05, max: 1, step: 0.05, value: 0.95, main: true, hint: "Only the likeliest tokens that together have this probability." },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, value: 1024, off: "no limit", main: true, hint: "A response ends after so many." },
  { name: "seed", label: "Seed", min: 0, step: 1, off: "random", main: true, hint: "The same seed gives the same response." },

  { name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01, off: "off", hint: "Drops tokens less likely than this share of the likeliest one." },
  { name: "top_k", label: "Top-k", min: 0, step: 1, off: "off", hint: "Only so many of the likeliest tokens." },
  { name: "typical_p", label: "Typical-p", min: 0.05, max: 1, step: 0.05, off: "off", hint: "Prefers tokens about as surprising as expected." },
  { name: "top_n_sigma", label: "Top-nσ", min: 0, step: 0.1, off: "off", hint: "Drops logits this many standard deviations below the best." },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 10, step: 0.05, off: "off", hint: "Above 1: tokens that occurred become less likely." },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, off: "off", hint: "Lowers a token once it has occurred in the response." },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, off: "off", hint: "Lowers a token each time it occurs." },
  { name: "repeat_last_n", label: "Penalty window", min: -1, step: 1, off: "all", hint: "The penalties look back so many tokens; −1: all." },
  { name: "dry_multiplier", label: "DRY multiplier", min: 0, step: 0.1, off: "off", hint: "Penalises going on with a sequence that occurred before." },
  { name: "dry_base", label: "DRY base", min: 1, step: 0.05, off: "1.75", hint: "How fast that penalty grows with the length repeated." },
  { name: "dry_allowed_length", label: "DRY allowed length", min: 1, step: 1, off: "2", hint: "Repeats up to this many tokens cost nothing." },
  { name: "dry_penalty_last_n", label: "DRY window", min: -1, step: 1, off: "all", hint: "It looks for repeats in so many tokens; −1: all." },
  { name: "xtc_probability", label: "XTC probability", min: 0, max: 1, step: 0.05, off: "off", hint: "How often the likeliest tokens are left out, for variety." },
  { name: "xtc_threshold", label: "XTC threshold", min: 0, max: 0.5, step: 0.01, off: "0.1", hint: "Only tokens above this probability are left out." },
  { name: "mirostat", label: "Mirostat", min: 0, max: 2, step: 1, off: "off", hint: "1 or 2: holds the surprise of the text at a level." },
  { name: "mirostat_tau", label: "Mirostat τ", min: 0, step: 0.1, off: "5", hint: "That level, in bits." },
  { name: "mirostat_eta", label: "Mirostat η", min: 0, step: 0.01, off: "0.1", hint: "How fast it adapts." },
  { name: "dynatemp_range", label: "Temperature range", min: 0, step: 0.1, off: "off", hint: "Temperature varies by so much, with the entropy of each token." },
  { name: "min_tokens", label: "Min tokens", min: 0, step: 1, off: "off", hint: "A response does not end before so many." },
  { name: "stop", label: "Stop sequences", text: true, off: "none", wide: true, hint: "The response ends where one of these appears; one per line." },
  { name: "bad_words", label: "Banned words", text: true, off: "none", wide: true, hint: "The response never holds these; one per line." },
  { name: "logit_bias", label: "Logit bias", text: true, pairs: true, off: "none", wide: true, hint: "Added to a token's logit, −100 to 100; one per line, such as “ yes: 5”." },
];

export const DEFAULTS = Object.fromEntries(PARAMETERS.map(({ name, value = null }) => [name, value]));

// What requests send for a field's text.
export function parsed({ text, min = -Infinity, max = Infinity }, given) {
  if (text) return given.trim() ? given : null;
  const number = given === "" ? NaN : Number(given);
  return Number.isFinite(number) && number >= min && number <= max ? number : null;
}

export function forRequest(values) {
  const sent = {};
  for (const { name, text, pairs } of PARAMETERS) {
    const value = values[name];
    if (value === null || value === undefined) continue;
    const lines = text ? value.split("\n").filter(Boolean) : null;
    sent[name] = pairs ? biases(lines) : (lines ?? value);
  }
  return sent;
}

// Lines such as "word: 5", by what stands before the last colon.
function biases(lines) {
  const pairs = lines.map((line) => /^(.+):\s*([-+]?[\d.]+)\s*$/.exec(line)).filter(Boolean);
  return Object.fromEntries(pairs.map(([, token, bias]) => [token, Number(bias)]));
}
