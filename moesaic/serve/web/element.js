// Elements from words: element("button", { type: "button", class: "plain" }, "Copy"). Text is text, never markup.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function drawing(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function icon(...paths) {
  return drawing("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, ...paths.map((d) => drawing("path", { d })));
}

// A button that is an icon, with its name for those who do not see it.
export function iconButton(label, paths, action) {
  const made = element("button", { type: "button", class: "quiet", title: label, "aria-label": label }, icon(...paths));
  made.addEventListener("click", action);
  return made;
}

export const ICONS = {
  copy: ["M5.5 5.5h7v7h-7z", "M10.5 5.5v-2h-7v7h2"],
  done: ["M3 8.5 6.5 12 13 4.5"],
  again: ["M12.5 8a4.5 4.5 0 1 1-1.4-3.2", "M12.8 2.2v3h-3"],
  edit: ["M3 13l.6-2.7 7-7 2.1 2.1-7 7z"],
  beside: ["M2.5 3.5h4.5v9h-4.5z", "M9 3.5h4.5v9h-4.5z"],
  onward: ["M3.5 4.5v7l4.5-3.5z", "M9 4.5v7l4.5-3.5z"],
  remove: ["M3 4.5h10", "M6.5 4.5v-2h3v2", "M4.5 4.5l.6 8.5h5.8l.6-8.5"],
  previous: ["M10 3.5 5.5 8l4.5 4.5"],
  next: ["M6 3.5 10.5 8 6 12.5"],
  save: ["M8 2.5v7.5", "M4.8 7 8 10.2 11.2 7", "M3 13h10"],
};
