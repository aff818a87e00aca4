// The curves. Their points come from the history of the server, then from the stream.

import * as format from "./format.js";

const RANGES = { hour: 3600, day: 86400, all: Infinity };
const LIMIT = 1500;
const DRAW_MS = 1000;
const ANEW_MS = 10000; // between two looks at the history of a run that was begun anew
const WHOLE = [1, 10, 100, 1000, 10000].flatMap((ten) => [ten, 2 * ten, 5 * ten]);
const COLUMNS = ["time", "step", "loss", "heldout_loss", "samples_per_second", "peers"];

// The speed of a step is 0 if the server did not read the metrics of the peers in time.
const valueOf = (point, name) => (name === "samples_per_second" ? point[name] || null : point[name]);

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

class Chart {
  // series: [{ field, label, colour, width, dots }]
  // whole: the values are whole numbers
  constructor(id, title, series, text, whole = false) {
    this.whole = whole;
    this.box = document.getElementById(`${id}-chart`);
    this.readout = document.getElementById(`${id}-now`);
    this.title = title;
    this.series = series;
    this.text = text;
    this.data = [[], ...series.map(() => [])];
    this.steps = [];
    new ResizeObserver(() => this.plot?.setSize(this.#size())).observe(this.box);
  }

  #size() {
    return { width: Math.max(this.box.clientWidth, 100), height: this.box.clientHeight };
  }

  build() {
    this.plot?.destroy();
    const axis = {
      stroke: colour("--muted"), font: "12px system-ui, sans-serif", ticks: { show: false }, gap: 6,
      grid: { stroke: colour("--line"), width: 1 },
    };
    this.plot = new uPlot({
      ...this.#size(),
      padding: [8, 16, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: true }, y: { range: (_, low, high) => this.#range(low, high) } },
      axes: [
        { ...axis, grid: { show: false }, size: 28, space: 70,
          values: (_, splits, __, ___, step) => splits.map((at) => format.tick(at, step)) },
        { ...axis, size: 52, space: 36, incrs: this.whole ? WHOLE : undefined },
      ],
      series: [{}, ...this.series.map((one) => ({
        label: one.label, stroke: colour(one.colour), width: one.width ?? 2, spanGaps: true,
        points: { show: one.dots ? true : undefined, size: one.dots ? 5 : 6, fill: colour(one.colour) },
        paths: one.dots ? () => null : undefined,
        fill: one.fill ? `${colour(one.colour)}1c` : undefined,
      }))],
      hooks: { setCursor: [(plot) => this.#say(plot.cursor.idx)] },
    }, this.data, this.box);
    this.#say(null);
  }

  #range(low, high) {
    if (low == null || high == null) return [0, 1];
    if (this.series[0].fill) return [0, high * 1.12 || 1];
    const room = Math.max((high - low) * 0.08, Math.abs(high) * 0.005, 1e-6);
    return [low - room, high + room];
  }

  show(points) {
    this.steps = points.step;
    this.data = [points.time, ...this.series.map(({ field }) => points[field])];
    if (!this.plot && this.steps.length) this.build(); // without points the axes would be arbitrary
    this.plot?.setData(this.data);
    this.#say(this.plot?.cursor.idx);
    this.box.setAttribute("aria-label", this.#summary());
  }

  #say(index) {
    const number = this.steps.length;
    if (!number) {
      this.readout.textContent = "no steps yet";
      return;
    }
    const at = index ?? number - 1;
    const when = index == null ? "" : ` at ${format.moment(this.data[0][at])}`;
    this.readout.textContent = `${this.text(at, this.data)} · step ${format.integer(this.steps[at])}${when}`;
  }

  #summary() {
    const number = this.steps.length;
    if (!number) return `${this.title}, no steps yet`;
    const [first, last] = [0, number - 1].map((at) => `${this.text(at, this.data)} at step ${this.steps[at]}`);
    return `${this.title}: from ${first} to ${last}`;
  }
}

export class Charts {
  #points = null; // of columns
  #range = "day";
  #fetching = 0;
  #fetchAt = 0;
  #drawAt = 0;

  constructor(stream) {
    this.stream = stream;
    this.charts = [
      new Chart("loss", "Loss", [
        { field: "loss", label: "loss", colour: "--accent" },
        { field: "heldout_loss", label: "held-out loss", colour: "--second", width: 1, dots: true },
      ], (at, [, losses, heldout]) =>
        format.loss(losses[at]) + (heldout[at] == null ? "" : `, held-out ${format.loss(heldout[at])}`)),
      new Chart("speed", "Samples per second", [
        { field: "samples_per_second", label: "samples per second", colour: "--accent", width: 1.5, fill: true },
      ], (at, [, speeds]) => format.speed(speeds[at])),
      new Chart("peers", "Peers", [
        { field: "peers", label: "peers", colour: "--accent", fill: true },
      ], (at, [, peers]) => format.integer(peers[at]), true),
    ];
    for (const button of document.querySelectorAll("[data-range]")) {
      button.addEventListener("click", () => this.#choose(button));
    }
    stream.addEventListener("clock", () => this.fetch()); // the first message of a connection; steps may have passed
    stream.addEventListener("run", () => this.#add(stream.run.last));
  }

  recolour() {
    for (const chart of this.charts) if (chart.plot) chart.build();
  }

  #choose(chosen) {
    this.#range = chosen.dataset.range;
    for (const button of document.querySelectorAll("[data-range]")) {
      button.setAttribute("aria-pressed", String(button === chosen));
    }
    this.fetch();
  }

  async fetch() {
    const number = ++this.#fetching;
    let answer;
    try {
      answer = await (await fetch(`/api/points.json?since=${this.#since()}&limit=${LIMIT}`)).json();
    } catch {
      return; // the stream says that the connection is lost, and asks again once it is back
    }
    if (number !== this.#fetching) return;
    this.#points = Object.fromEntries(COLUMNS.map((name) => [name, answer.points.map((point) => valueOf(point, name))]));
    this.#add(this.stream.run?.last);
    this.#draw();
  }

  #add(point) {
    const points = this.#points;
    if (!points || !point) return;
    const last = points.step.length - 1;
    if (last >= 0 && point.step < points.step[last]) { // the run was begun anew; the server keeps its curves for a while
      this.#fetchAt ||= setTimeout(() => { this.#fetchAt = 0; this.fetch(); }, ANEW_MS);
      return;
    }
    const isNew = last < 0 || point.step > points.step[last];
    if (!isNew && point.heldout_loss === points.heldout_loss[last] && point.loss === points.loss[last]) return;
    for (const name of COLUMNS) points[name][isNew ? last + 1 : last] = valueOf(point, name);
    const since = this.#since();
    while (points.time.length > 1 && points.time[0] < since) for (const name of COLUMNS) points[name].shift();
    if (points.time.length > 2 * LIMIT) this.fetch(); // thinned
    this.#drawSoon();
  }

  // Rounded to a whole minute, so that pages that ask at the same time share one answer.
  #since() {
    return Math.max(Math.floor((this.stream.now() - RANGES[this.#range]) / 60) * 60, 0);
  }

  #drawSoon() {
    if (this.#drawAt) return;
    this.#drawAt = setTimeout(() => this.#draw(), DRAW_MS);
  }

  #draw() {
    clearTimeout(this.#drawAt);
    this.#drawAt = 0;
    if (!this.#points) return;
    for (const chart of this.charts) chart.show(this.#points);
    const measured = this.#points.heldout_loss.findLast((value) => value != null);
    document.getElementById("heldout").textContent = format.loss(measured);
  }
}
