// The live chart: tokens a second that were generated, and what became of them. The gap, for nobody, is shaded.
import { count, element, keep, percent, setText } from "./dom.js";

const LEAST = 60; // seconds that are shown, also where there are fewer
const [WIDTH, HEIGHT] = [960, 200];
const SVG = "http://www.w3.org/2000/svg";
const AREAS = ["useful", "orphaned", "pending"]; // from the ground up; what is above them is not ours to see

function drawn(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export class Chart {
  constructor(svg, legend, scale) {
    Object.assign(this, { svg, legend, scale });
    const hatch = drawn("pattern", { id: "hatch", width: 8, height: 8, patternUnits: "userSpaceOnUse" });
    hatch.append(drawn("rect", { width: 8, height: 8 }), drawn("path", { d: "M-2 10 10-2M-2 2 2-2M6 10l4-4" }));
    const grid = drawn("path", { class: "grid", d: `M0 ${HEIGHT / 2}H${WIDTH}` });
    this.areas = AREAS.map((name) => drawn("path", { class: name }));
    this.lines = ["generated", "delivered"].map((name) => drawn("path", { class: name }));
    svg.append(hatch, grid, ...this.areas, ...this.lines);
  }

  // Shows curves, as /api/history has them, and the newest of them in words.
  draw(curves, rates) {
    const { span, top, outlines } = layers(curves);
    const x = (time) => (WIDTH * (1 + time / span)).toFixed(1);
    const y = (value) => (HEIGHT * (1 - value / top)).toFixed(1);
    const points = outlines.map((outline) => outline.map(([time, value]) => `${x(time)} ${y(value)}`));
    const path = (all) => (all.length ? `M${all.join("L")}` : "");
    for (const [n, area] of this.areas.entries()) area.setAttribute("d", path([...points[n + 1], ...points[n].toReversed()]));
    this.lines[0].setAttribute("d", path(points.at(-1)));
    this.lines[1].setAttribute("d", path(points[1]));
    this.#say(rates, top, span);
  }

  #say(rates, top, span) {
    const shown = inWords(rates);
    keep(this.legend, shown, () => element("div", {}, element("dt"), element("dd")), (entry, [kind, title, value]) => {
      entry.className = kind;
      setText(entry.firstElementChild, title);
      setText(entry.lastElementChild, value);
    });
    const said = shown.map(([, title, value]) => `${title} ${value}`).join(", ");
    this.svg.setAttribute("aria-label", `Tokens a second of the last ${count(span)} s; now ${said}`);
    setText(this.scale, `The last ${count(span)} s, rates over 5 s; full height ${count(top)} tokens/s. A token is where it was generated, as what became of it; pending: not known yet.`);
  }
}

// What is drawn: lines of [seconds before the newest, tokens a second], the ground, one above each area, and all that
// was generated; `span` seconds wide and `top` tokens a second high.
export function layers(curves) {
  const times = curves.at.map((time) => time - curves.at.at(-1));
  const heights = [times.map(() => 0)];
  for (const name of AREAS) heights.push(heights.at(-1).map((value, n) => value + curves[name][n]));
  heights.push(curves.generated);
  return {
    span: Math.max(-(times[0] ?? 0), LEAST),
    top: nice(Math.max(1, ...curves.generated)),
    outlines: heights.map((values) => values.map((value, n) => [times[n], value])),
  };
}

// The newest rates as [kind, title, value]; null: there are none yet.
export function inWords(rates) {
  const share = rates?.generated > 0 ? ` (${percent(rates.orphaned / rates.generated)})` : "";
  const shown = [
    ["generated", "generated", count(rates?.generated)],
    ["useful", "useful", count(rates?.useful)],
    ["orphaned", "for nobody", count(rates?.orphaned) + share],
    ["pending", "pending", count(rates?.pending)],
  ];
  if (rates?.unattributed >= 0.5) shown.push(["unattributed", "unattributed", count(rates.unattributed)]);
  return shown;
}

// The next round number that is not smaller.
export function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value);
}
