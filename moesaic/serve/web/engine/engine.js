// The engine's live metrics, twice a second: a gauge and a curve each, and a heat map of the experts' load.

import { element, drawing } from "../element.js";
import { ExpertMap } from "./experts.js";

const SAMPLES = 60; // in a curve
const percent = (value) => `${Math.round(value * 100)} %`;
const count = (value) => Math.round(value).toLocaleString("en");
const GAUGES = [
  { name: "tokens_per_second", label: "Throughput, tokens/s", show: (value) => (value < 100 ? value.toFixed(1) : count(value)) },
  { name: "ttft_seconds", label: "Time to first token", show: (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`) },
  { name: "running", label: "Requests running", show: count },
  { name: "waiting", label: "Requests waiting", show: count },
  { name: "cache_share", label: "KV cache usage", show: percent, max: 1 },
];

export class Live {
  // `root` is a folded panel: nothing is asked while it is shut.
  constructor(api, root) {
    this.api = api;
    this.root = root;
    this.experts = document.getElementById("experts-panel");
    root.addEventListener("toggle", () => this.update());
    this.experts.addEventListener("toggle", () => this.map.draw());
    this.state = document.getElementById("engine-state");
    this.map = new ExpertMap(document.getElementById("experts"), document.getElementById("experts-note"));
    this.gauges = GAUGES.map((gauge) => new Gauge(gauge));
    document.getElementById("gauges").append(...this.gauges.map((gauge) => gauge.root));
    this.watching = null;
    document.addEventListener("visibilitychange", () => this.update());
  }

  // Streams only while the panel is visible.
  update(open = this.open) {
    this.open = open;
    const useful = open && this.root.open && !document.hidden;
    if (useful && !this.watching) this.watch((this.watching = new AbortController()).signal);
    else if (!useful && this.watching) {
      this.watching.abort();
      this.watching = null;
    }
  }

  async watch(signal) {
    for (let wait = 1000; !signal.aborted; wait = Math.min(wait * 2, 15_000)) {
      try {
        for await (const sample of this.api.events("/live/stream", { signal })) {
          this.show(sample);
          wait = 1000;
        }
      } catch (error) {
        if (signal.aborted) return;
        this.showState(error.status === 401 ? "API key required" : "unreachable", "away");
      }
      await new Promise((resume) => setTimeout(resume, wait));
    }
  }

  showState(text, kind) {
    if (this.state.textContent !== text) this.state.textContent = text;
    this.state.dataset.kind = kind;
  }

  show(sample) {
    this.showState(sample.running ? "working" : "idle", sample.running ? "busy" : "idle");
    for (const gauge of this.gauges) gauge.push(sample[gauge.name]);
    this.experts.hidden = !Object.keys(sample.experts ?? {}).length; // a dense model has none
    this.map.push(sample.experts ?? {});
  }
}

class Gauge {
  constructor({ name, label, show, max = 0 }) {
    Object.assign(this, { name, format: show, max });
    this.samples = [];
    this.value = element("dd", {}, "–");
    this.area = drawing("path", { class: "area" });
    this.line = drawing("path", { class: "line" });
    const curve = drawing("svg", { viewBox: `0 0 ${SAMPLES - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.line);
    this.root = element("div", { class: "gauge" }, element("dt", {}, label), this.value, curve);
  }

  push(value) {
    const known = typeof value === "number";
    this.value.textContent = known ? this.format(value) : "–";
    this.samples.push(known ? value : 0);
    if (this.samples.length > SAMPLES) this.samples.shift();
    const top = this.max || Math.max(...this.samples) || 1;
    const begin = SAMPLES - this.samples.length;
    const points = this.samples.map((sample, number) => `${begin + number},${(19 - 18 * Math.min(1, sample / top)).toFixed(2)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${begin},20L${points.join("L")}L${SAMPLES - 1},20Z`);
  }
}
