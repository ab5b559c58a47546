// The button between light and dark; until it is used, the system's choice holds.

import { remember } from "../store/preferences.js";

export function themeSwitch(button, changed) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const show = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    changed();
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    remember("theme", document.documentElement.dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  show();
}
