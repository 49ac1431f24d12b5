// A small line chart: SVG, one to six lines over the steps of a run, the values under the pointer.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 320;
const HEIGHT = 150;
const ROOM = { left: 40, right: 8, top: 10, bottom: 20 };
const MOST_POINTS = 240; // per line; more are averaged in pairs

/** Points of one metric. Long ones are thinned to averages, all of the same number of lines. */
export class Series {
  constructor() {
    this.points = []; // [step, value]
    this.of = 1; // lines that a point averages
    this.open = null; // [steps' sum, values' sum, count] of the point that is not full yet
    this.last = null;
  }

  add(step, value) {
    this.last = [step, value];
    this.open ??= [0, 0, 0];
    this.open[0] += step;
    this.open[1] += value;
    if (++this.open[2] < this.of) return;
    this.points.push([this.open[0] / this.of, this.open[1] / this.of]);
    this.open = null;
    if (this.points.length < MOST_POINTS) return;
    const halved = [];
    for (let n = 0; n + 1 < this.points.length; n += 2) halved.push([0, 1].map((k) => (this.points[n][k] + this.points[n + 1][k]) / 2));
    this.points = halved;
    this.of *= 2;
  }

  /** The points, and the newest line as it is. */
  get drawn() {
    const end = this.points.at(-1);
    return this.last && (!end || end[0] < this.last[0]) ? [...this.points, this.last] : this.points;
  }
}

export const short = (value) => {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e15 || (size && size < 1e-4)) return value.toExponential(1);
  for (const [unit, mark] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) {
      const of = unit === 1e4 ? 1e3 : unit;
      return `${trimmed(value / of, 3)}${mark}`;
    }
  }
  return Number.isInteger(value) ? String(value) : trimmed(value, 3);
};
const trimmed = (value, digits) => String(Number(value.toPrecision(digits)));

/** Round numbers from low to high, three to five of them. */
export function ticks(low, high) {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
  return found;
}

function svg(tag, attributes, text) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export class Chart {
  /** lines: [[name, Series], ...] */
  constructor(figure, title, lines) {
    this.figure = figure;
    this.title = title;
    this.lines = lines;
    this.last = figure.querySelector(".last");
    this.legend = figure.querySelector(".legend");
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    figure.append(this.picture);
    this.at = null; // the step under the pointer
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => ((this.at = null), this.draw()));
  }

  point(event) {
    const { left, width } = this.picture.getBoundingClientRect();
    this.at = this.toStep?.(((event.clientX - left) / width) * WIDTH) ?? null;
    this.draw();
  }

  draw() {
    const drawn = this.lines.map(([name, series]) => [name, series.drawn, series.last]);
    const all = drawn.flatMap(([, points]) => points);
    if (!all.length) return;
    const [first, end] = [Math.min(...all.map(([step]) => step)), Math.max(...all.map(([step]) => step))];
    let [low, high] = [Math.min(...all.map(([, value]) => value)), Math.max(...all.map(([, value]) => value))];
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    const x = (step) => ROOM.left + ((step - first) / (end - first || 1)) * (WIDTH - ROOM.left - ROOM.right);
    const y = (value) => ROOM.top + ((high - value) / (high - low)) * (HEIGHT - ROOM.top - ROOM.bottom);
    this.toStep = (place) => first + ((place - ROOM.left) / (WIDTH - ROOM.left - ROOM.right)) * (end - first);
    const parts = ticks(low, high).flatMap((value) => [
      svg("line", { class: value === 0 ? "grid zero" : "grid", x1: ROOM.left, x2: WIDTH - ROOM.right, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: ROOM.left - 5, y: y(value) + 4, "text-anchor": "end" }, short(value)),
    ]);
    const names = end > first ? [[first, "start"], [end, "end"]] : [[end, "start"]];
    for (const [step, anchor] of names) parts.push(svg("text", { class: "tick", x: x(step), y: HEIGHT - 4, "text-anchor": anchor }, short(Math.round(step))));
    const shown = [];
    drawn.forEach(([name, points, last], n) => {
      if (!points.length) return;
      const found = this.at === null ? last : points.reduce((best, one) => (Math.abs(one[0] - this.at) < Math.abs(best[0] - this.at) ? one : best));
      parts.push(svg("polyline", { class: `curve l${n}`, points: points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
      parts.push(svg("circle", { class: `dot l${n}`, cx: x(found[0]), cy: y(found[1]), r: 3.2 }));
      shown.push([name, found, n]);
    });
    if (this.at !== null && shown.length) {
      const place = x(shown[0][1][0]);
      parts.push(svg("line", { class: "pointer", x1: place, x2: place, y1: ROOM.top, y2: HEIGHT - ROOM.bottom }));
    }
    this.picture.replaceChildren(...parts);
    this.tell(shown);
  }

  tell(shown) {
    if (!shown.length) return;
    const step = short(Math.round(shown[0][1][0]));
    const single = this.lines.length === 1;
    this.last.textContent = single ? short(shown[0][1][1]) : "";
    const labels = shown.map(([name, [, value], n]) => {
      const label = document.createElement("span");
      label.className = `l${n}`;
      label.textContent = `${name} ${short(value)}`;
      return label;
    });
    this.legend.replaceChildren(...(single ? [] : labels));
    this.picture.setAttribute("aria-label", `${this.title}: ${shown.map(([name, [, value]]) => `${single ? "" : `${name} `}${short(value)}`).join(", ")} at step ${step}`);
  }
}
