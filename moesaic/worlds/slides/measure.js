// Where everything on every slide of the page is; evaluated apart from the page's own scripts, in a world of its own.
// A text is where its letters are, a picture where its box is; what hides something cuts it.
(mostItems, mostText) => {
  const PICTURES = new Set("img svg canvas video picture object iframe".split(" "));
  const SKIPPED = new Set("script style template head noscript title option".split(" "));
  const squeeze = (text) => text.replace(/\s+/g, " ").trim();
  const own = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && squeeze(node.data));

  const cut = (box, by) => [Math.max(box[0], by.left), Math.max(box[1], by.top),
    Math.min(box[2], by.right), Math.min(box[3], by.bottom)];
  const area = (box) => Math.max(0, box[2] - box[0]) * Math.max(0, box[3] - box[1]);
  const colour = (text) => (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);

  const readable = (element, style, window) => {
    if (parseFloat(style.fontSize) < 10) return false;
    const [red, green, blue, alpha = 1] = colour(style.color);
    if (alpha < 0.3) return false;
    for (let below = element; below; below = below.parentElement) {
      const [r, g, b, solid = 1] = colour(window.getComputedStyle(below).backgroundColor);
      if (solid > 0.5) return Math.abs(red - r) + Math.abs(green - g) + Math.abs(blue - b) > 90;
    }
    return true;
  };

  const items = (document) => {
    const found = [], window = document.defaultView;
    const walk = (element) => {
      const name = element.localName;
      if (SKIPPED.has(name) || found.length >= mostItems) return;
      const picture = PICTURES.has(name);
      if (!picture && !own(element)) return [...element.children].forEach(walk);
      let rect = element.getBoundingClientRect();
      if (!picture) {
        const range = document.createRange();
        range.selectNodeContents(element);
        rect = range.getBoundingClientRect();
      }
      let box = [rect.left, rect.top, rect.right, rect.bottom];
      const whole = area(box), style = window.getComputedStyle(element);
      for (let above = picture ? element.parentElement : element; above && above !== document.body; above = above.parentElement)
        if (window.getComputedStyle(above).overflow !== "visible") box = cut(box, above.getBoundingClientRect());
      const shown = whole > 0 && area(box) > 0.9 * whole &&
        element.checkVisibility({opacityProperty: true, visibilityProperty: true}) && +style.opacity > 0.3;
      found.push({
        kind: picture ? "picture" : /^h[1-3]$/.test(name) ? "heading" : "text",
        text: squeeze(picture ? element.getAttribute("alt") || "" : element.textContent).slice(0, mostText),
        box, shown: shown && (picture || readable(element, style, window)),
      });
    };
    walk(document.body);
    return found;
  };
  return JSON.stringify([...document.querySelectorAll("iframe")].map((frame) => items(frame.contentDocument)));
}
