// Stays at the end of the conversation while a response grows, unless the reader has scrolled away from it.

export class Scrolling {
  constructor(scroll, button) {
    Object.assign(this, { scroll, button });
    this.atEnd = true;
    scroll.addEventListener("scroll", () => this.note());
    button.addEventListener("click", () => this.toEnd());
  }

  follow() {
    if (this.atEnd) this.toEnd();
  }

  toEnd() {
    this.scroll.scrollTop = this.scroll.scrollHeight;
    this.note();
  }

  note() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroll;
    this.atEnd = scrollHeight - scrollTop - clientHeight < 80;
    this.button.hidden = this.atEnd;
  }
}
