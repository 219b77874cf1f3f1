// The live chart: tokens a second that were generated, and of them those that somebody got. The gap between is shaded.
import { count, element, keep, percent, setText } from "./dom.js";

const [LEAST, MOST] = [60, 300]; // seconds that are shown: as many as there are, between these
const SMOOTH = 5; // seconds over which a rate is taken: engines count in steps, and beats cut them
const [WIDTH, HEIGHT] = [960, 200];
const SVG = "http://www.w3.org/2000/svg";

function drawn(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export class Chart {
  #points = [];

  constructor(svg, legend, scale) {
    Object.assign(this, { svg, legend, scale });
    const hatch = drawn("pattern", { id: "hatch", width: 8, height: 8, patternUnits: "userSpaceOnUse" });
    hatch.append(drawn("rect", { width: 8, height: 8 }), drawn("path", { d: "M-2 10 10-2M-2 2 2-2M6 10l4-4" }));
    this.paths = Object.fromEntries(["grid", "under", "gap", "out", "useful"].map((name) => [name, drawn("path", { class: name })]));
    svg.append(hatch, ...Object.values(this.paths));
  }

  // Begins anew with what the exporter remembers.
  start(points) {
    this.#points = points;
  }

  add(point) {
    const last = this.#points.at(-1);
    if (last && point.beats <= last.beats) return;
    this.#points.push(point);
    while (this.#points[0].at < point.at - MOST - SMOOTH) this.#points.shift();
  }

  draw() {
    const rates = this.#rates();
    const now = rates.at(-1) ?? { out: null, useful: null, orphaned: null };
    const top = nice(Math.max(1, ...rates.map((rate) => Math.max(rate.out, rate.useful + rate.orphaned))));
    const end = now.at ?? 0;
    const span = Math.min(Math.max(end - (rates[0]?.at ?? end), LEAST), MOST);
    const x = (rate) => (WIDTH * (1 - (end - rate.at) / span)).toFixed(1);
    const y = (value) => (HEIGHT * (1 - Math.max(value, 0) / top)).toFixed(1);
    const line = (value) => rates.map((rate) => `${x(rate)} ${y(value(rate))}`);
    const area = (upper, lower) => (rates.length ? `M${line(upper).join("L")}L${line(lower).reverse().join("L")}Z` : "");
    const [out, useful, both] = [(r) => r.out, (r) => r.useful, (r) => r.useful + r.orphaned];
    this.paths.out.setAttribute("d", rates.length ? `M${line(out).join("L")}` : "");
    this.paths.useful.setAttribute("d", rates.length ? `M${line(useful).join("L")}` : "");
    this.paths.under.setAttribute("d", area(useful, () => 0));
    this.paths.gap.setAttribute("d", area(both, useful));
    this.paths.grid.setAttribute("d", `M0 ${HEIGHT / 2}H${WIDTH}`);
    this.#say(now, top, span);
  }

  #rates() {
    const points = this.#points;
    const rates = [];
    let from = 0;
    for (let to = 1; to < points.length; to++) {
      while (from < to - 1 && points[from + 1].at <= points[to].at - SMOOTH) from++;
      const time = points[to].at - points[from].at;
      const rate = (name) => (points[to][name] - points[from][name]) / time;
      if (time > 0) rates.push({ at: points[to].at, out: rate("out"), useful: rate("useful"), orphaned: rate("orphaned") });
    }
    return rates.filter((rate) => rate.at >= points.at(-1).at - MOST);
  }

  #say(now, top, span) {
    const share = now.out > 0 ? ` (${percent(now.orphaned / now.out)})` : "";
    const shown = [
      ["out", "generated", count(now.out)],
      ["useful", "useful", count(now.useful)],
      ["orphaned", "for nobody", count(now.orphaned) + share],
    ];
    keep(this.legend, shown, () => element("div", {}, element("dt"), element("dd")), (entry, [kind, title, value]) => {
      entry.className = kind;
      setText(entry.firstElementChild, title);
      setText(entry.lastElementChild, value);
    });
    const said = shown.map(([, title, value]) => `${title} ${value}`).join(", ");
    this.svg.setAttribute("aria-label", `Tokens a second of the last ${count(span)} s; now ${said}`);
    setText(this.scale, `The last ${count(span)} s, rates over ${SMOOTH} s; full height ${count(top)} tokens/s.`);
  }
}

// The next round number that is not smaller.
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value);
}
