// Small things the page remembers in this browser: settings, theme, saved prompts. Storage may be full or forbidden: then it
// remembers nothing.

const PREFIX = "moesaic.";

export function recall(name, otherwise = null) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
