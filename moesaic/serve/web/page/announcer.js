// Announces a response to screen readers, sentence by sentence: single tokens as they come would be noise.

export class Announcer {
  constructor(region) {
    this.region = region;
    this.pending = "";
  }

  push(text) {
    this.pending += text;
    const ends = [...this.pending.matchAll(/[.!?:;]["')\]]*\s|\n/g)].at(-1);
    if (!ends) return;
    const place = ends.index + ends[0].length;
    this.announce(this.pending.slice(0, place));
    this.pending = this.pending.slice(place);
  }

  finish() {
    this.announce(this.pending);
    this.pending = "";
  }

  announce(text) {
    const plain = text.replace(/[*_`#>|~]+/g, "").trim();
    if (!plain) return;
    const line = document.createElement("p");
    line.textContent = plain;
    this.region.append(line);
    while (this.region.children.length > 20) this.region.firstChild.remove();
  }
}
