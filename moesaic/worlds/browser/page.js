// What is on a page, and one action on it; evaluated apart from the page's own scripts, in a world of its own.
// `text_window.py` reads pages by the same rules.
(kind, number, value, mostNodes, mostText) => {
  const BLOCK = new Set(("address article aside blockquote body dd div dl dt fieldset footer form h1 h2 h3 h4 h5 h6 " +
    "header hr li main nav ol p pre section table td th tr ul br").split(" "));
  const SKIPPED = new Set("script style template head noscript option svg iframe object".split(" "));
  const squeeze = (text) => text.replace(/[ \t\n\r\f]+/g, " ").trim();
  const items = [], controls = [];
  let words = "", visited = 0, length = 0, cut = false;

  const flush = () => {
    const text = squeeze(words);
    words = "";
    if (text) items.push({kind: "text", text: text.slice(0, mostText)});
    length += text.length;
  };
  const control = (element, item) => {
    flush();
    items.push(item);
    controls.push(element);
    length += 20 + item.label.length;
  };
  const hidden = (element) => element.hidden || getComputedStyle(element).display === "none";
  const label = (element) => squeeze(element.getAttribute("aria-label") || element.name || "").slice(0, 200);

  const walk = (node) => {
    if (cut || ++visited > mostNodes || length > mostText) { cut = true; return; }
    if (node.nodeType === Node.TEXT_NODE) { words += node.nodeValue.slice(0, mostText); return; }
    if (node.nodeType !== Node.ELEMENT_NODE) return;
    const name = node.localName;
    if (SKIPPED.has(name) || hidden(node)) return;
    if (name === "a" && node.hasAttribute("href"))
      return control(node, {kind: "link", label: squeeze(node.textContent).slice(0, 200)});
    if (name === "button") return control(node, {kind: "button", label: squeeze(node.textContent).slice(0, 200)});
    if (name === "select") {
      const options = [...node.options].slice(0, 100).map((option) => squeeze(option.text).slice(0, 100));
      const chosen = node.selectedIndex < 0 ? "" : options[node.selectedIndex] || "";
      return control(node, {kind: "choice", label: label(node), options, value: chosen});
    }
    if (name === "textarea") return control(node, {kind: "textbox", label: label(node), value: node.value.slice(0, 500)});
    if (name === "input") {
      if (node.type === "hidden") return;
      if (node.type === "checkbox") return control(node, {kind: "checkbox", label: label(node), checked: node.checked});
      if (node.type === "submit") return control(node, {kind: "button", label: squeeze(node.value).slice(0, 200)});
      return control(node, {kind: "textbox", label: label(node), value: node.value.slice(0, 500)});
    }
    if (BLOCK.has(name)) flush();
    for (const child of node.childNodes) walk(child);
    if (BLOCK.has(name)) flush();
  };
  if (document.body) walk(document.body);
  flush();

  const element = controls[number - 1];
  if (kind && !element) return JSON.stringify({problem: "no such control"});
  if (kind === "click") element.click();
  if (kind === "type") element.value = value;
  if (kind === "choose") element.selectedIndex = items.filter((item) => item.kind !== "text")[number - 1].options.indexOf(value);
  if (kind === "type" || kind === "choose")
    for (const event of ["input", "change"]) element.dispatchEvent(new Event(event, {bubbles: true}));
  return JSON.stringify({title: squeeze(document.title).slice(0, 200), items, cut});
}
