// Runs before the page is drawn, so that a chosen theme does not flash in late. Without a choice the system's holds.
try {
  const chosen = JSON.parse(localStorage.getItem("moesaic.theme"));
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be forbidden; the system's theme is fine.
}
