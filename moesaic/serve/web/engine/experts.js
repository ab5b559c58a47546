// The load of the experts in the last seconds as a heat map: a row for each layer, a column for each expert.
//
// The server counts tokens since it started; those of the last seconds are the difference between the newest counts and
// some samples ago. A cell's shade is its load: its tokens over the mean of its layer.

const SAMPLES = 10; // about five seconds
const FULL = 4; // the load that has the full color
const number = (value) => value.toLocaleString("en");

export class ExpertMap {
  constructor(canvas, note) {
    Object.assign(this, { canvas, note });
    this.history = [];
    this.rows = [];
    this.cursor = null; // { row, column } that is pointed at
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("pointermove", (event) => this.point(this.cellAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("keydown", (event) => this.walk(event));
  }

  push(experts) {
    const layers = Object.keys(experts).sort((a, b) => a - b);
    if (this.history.length && layers.join() !== this.layers?.join()) this.history = [];
    this.layers = layers;
    this.history.push(experts);
    if (this.history.length > SAMPLES + 1) this.history.shift();
    const [before] = this.history;
    this.rows = layers.map((layer) => {
      // Smaller counts than before: the server was restarted.
      const tokens = experts[layer].map((now, expert) => Math.max(0, now - (before[layer][expert] ?? 0)));
      return { layer, tokens, total: tokens.reduce((sum, one) => sum + one, 0) };
    });
    this.canvas.hidden = layers.length === 0;
    this.draw();
    this.describe();
  }

  get columns() {
    return Math.max(1, ...this.rows.map((row) => row.tokens.length));
  }

  // Its tokens over the mean of its layer.
  load({ tokens, total }, column) {
    return total ? (tokens[column] * tokens.length) / total : 0;
  }

  draw() {
    const { canvas, rows, columns } = this;
    if (!rows.length) return;
    const width = canvas.parentElement.clientWidth;
    const cell = width / columns;
    const tall = Math.max(3, Math.min(16, cell, 420 / rows.length));
    const gap = Math.min(cell, tall) >= 5 ? 1 : 0;
    const scale = devicePixelRatio || 1;
    const height = Math.ceil(rows.length * tall);
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    const style = getComputedStyle(canvas);
    const [ink, paper] = [style.color, style.caretColor]; // colors the style sheet can give a canvas, by theme
    const paint = canvas.getContext("2d");
    paint.scale(scale, scale);
    const snap = (place) => Math.round(place * scale) / scale; // to whole pixels, or gaps look uneven
    rows.forEach((row, at) => {
      const [top, bottom] = [snap(at * tall), snap((at + 1) * tall)];
      for (let column = 0; column < row.tokens.length; column++) {
        const [left, right] = [snap(column * cell), snap((column + 1) * cell)];
        paint.globalAlpha = 1;
        paint.fillStyle = paper;
        paint.fillRect(left, top, right - left - gap, bottom - top - gap);
        paint.globalAlpha = Math.min(1, Math.sqrt(this.load(row, column) / FULL));
        paint.fillStyle = ink;
        paint.fillRect(left, top, right - left - gap, bottom - top - gap);
      }
    });
    paint.globalAlpha = 1;
    if (this.cursor) {
      paint.strokeStyle = style.outlineColor;
      paint.lineWidth = 2;
      paint.strokeRect(this.cursor.column * cell, this.cursor.row * tall, Math.max(cell - gap, 3), Math.max(tall - gap, 3));
    }
  }

  describe() {
    const { rows, cursor } = this;
    if (!rows.length) return;
    if (cursor && rows[cursor.row]?.tokens[cursor.column] !== undefined) {
      const row = rows[cursor.row];
      const part = row.total ? ((row.tokens[cursor.column] / row.total) * 100).toFixed(1) : "0";
      const times = this.load(row, cursor.column).toFixed(1);
      this.note.textContent = `Layer ${row.layer}, expert ${cursor.column}: ${part} % of its layer's tokens, ${times} × the mean load.`;
      return;
    }
    const total = rows.reduce((sum, row) => sum + row.total, 0);
    if (!total) {
      this.note.textContent = `${rows.length} layer${rows.length === 1 ? "" : "s"} of ${this.columns} experts, idle.`;
      return;
    }
    let best = { load: -1 };
    for (const row of rows) {
      row.tokens.forEach((_, expert) => {
        const load = this.load(row, expert);
        if (load > best.load) best = { load, layer: row.layer, expert };
      });
    }
    this.note.textContent = `${number(total)} tokens routed in the last seconds. Highest load: layer ${best.layer}, expert ${best.expert}, ${best.load.toFixed(1)} × the mean.`;
  }

  point(cell) {
    this.cursor = cell;
    this.draw();
    this.describe();
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * this.rows.length);
    const column = Math.floor(((event.clientX - box.left) / box.width) * this.columns);
    return this.rows[row]?.tokens[column] === undefined ? null : { row, column };
  }

  walk(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !this.rows.length) return;
    event.preventDefault();
    const { row, column } = this.cursor ?? { row: 0, column: step[1] ? -1 : 0 };
    const to = (value, limit) => Math.max(0, Math.min(limit - 1, value));
    this.point({ row: to(row + step[0], this.rows.length), column: to(column + step[1], this.columns) });
  }
}
