// A card for each engine: its verdict with the evidence, and how far its queue is from its limits.
import { NOT_KNOWN, count, element, keep, percent, quantity, seconds, setClass, setText, sum } from "./dom.js";

export const BAD_STATES = ["stuck", "dead", "blind"];

export function slotsUsed(engine) {
  if (engine.running == null || !engine.slots) return null;
  return engine.stale ? 0 : engine.running / engine.slots;
}

export function stateLooks(state) {
  return BAD_STATES.includes(state) ? "bad" : state === "restarted" ? "warn" : "";
}

// What is shown as bars: {label, value, share, limit, bad, says}; share and limit are parts of the whole bar.
function gauges(engine, limits) {
  const { age_cut: cut, deadlines } = limits;
  const longest = Math.max(cut, deadlines.interactive ?? cut);
  const age = engine.queue_age;
  const bars = [{
    label: "queue age", share: age == null ? null : age / longest, limit: cut / longest, bad: age > cut,
    says: age == null ? NOT_KNOWN : `${seconds(age)}, limit ${seconds(cut)}`,
  }];
  for (const [kind, slack] of Object.entries(engine.slack)) {
    const deadline = deadlines[kind];
    const of = deadline == null ? "" : ` of ${seconds(deadline)}`;
    bars.push({
      label: `slack, ${kind}`, share: deadline ? slack / deadline : null, limit: null,
      bad: slack < 0 || (deadline != null && slack < Math.max(deadline - cut, 0) && kind === "interactive"),
      says: slack < 0 ? `missed by ${seconds(-slack)}` : seconds(slack) + of,
    });
  }
  const used = slotsUsed(engine);
  bars.push({
    label: "slots used", share: used, limit: null, bad: false,
    says: used == null ? NOT_KNOWN : `${percent(used)}: ${count(engine.running)} of ${count(engine.slots)}, ${count(engine.waiting)} waiting`,
  });
  return bars;
}

function makeGauge() {
  const bar = element("span", { class: "bar", "aria-hidden": "true" }, element("i"), element("u"));
  return element("div", { class: "gauge" }, element("span", { class: "label" }), bar, element("span", { class: "value" }));
}

function showGauge(gauge, { label, share, limit, bad, says }) {
  const [name, bar, value] = gauge.children;
  setText(name, label);
  setText(value, says);
  setClass(value, bad ? "value bad" : "value");
  setClass(bar, bad ? "bar bad" : "bar");
  bar.classList.toggle("none", share == null);
  bar.firstElementChild.style.width = `${100 * Math.min(Math.max(share ?? 0, 0), 1)}%`;
  bar.lastElementChild.hidden = limit == null;
  bar.lastElementChild.style.left = `calc(${100 * (limit ?? 0)}% - 2px)`;
}

function makeCard() {
  const head = element("header", {}, element("h3"), element("span", { class: "state" }));
  return element("article", { class: "card" }, head, element("p"), element("div"), element("p", { class: "quiet" }));
}

export function showCards(place, engines, limits) {
  keep(place, engines, makeCard, (card, engine) => {
    const [head, evidence, bars, tokens] = card.children;
    setText(head.firstElementChild, engine.name);
    setText(head.lastElementChild, engine.state);
    setClass(head.lastElementChild, `state ${stateLooks(engine.state)}`);
    setText(evidence, engine.evidence);
    keep(bars, gauges(engine, limits), makeGauge, showGauge);
    setText(tokens, `tokens: ${ledger(engine.tokens)}`);
  });
}

// The ledger of an engine: all that was generated, and its parts.
export function ledger({ out, useful, orphaned, pending, unattributed }) {
  const lost = sum(orphaned);
  const parts = [`${count(out)} out`, `${count(useful)} useful`, `${count(lost)} for nobody${out > 0 ? ` (${percent(lost / out)})` : ""}`];
  if (pending >= 0.5) parts.push(`${count(pending)} pending`);
  if (unattributed >= 0.5) parts.push(`${count(unattributed)} unattributed`);
  return parts.join(", ");
}

// Engines that are not shown, by state; empty where all are.
export function more(states, shown) {
  const left = { ...states };
  for (const { state } of shown) left[state] -= 1;
  const parts = Object.entries(left).filter(([, number]) => number > 0).map(([state, number]) => `${count(number)} ${state}`);
  return parts.length ? `And others: ${parts.join(", ")}.` : "";
}

export const ENGINE_COLUMNS = [
  { title: "engine", cell: (engine) => engine.name },
  { title: "kind", cell: (engine) => engine.family || NOT_KNOWN },
  { title: "models", cell: (engine) => engine.models.join(", ") || NOT_KNOWN },
  { title: "page", cell: (engine) => engine.url },
  { title: "state", cell: (engine) => [engine.state, stateLooks(engine.state)] },
  { title: "open streams", number: true, cell: (engine) => count(engine.open_streams) },
  { title: "seen by sockets", number: true, cell: (engine) => percent(engine.coverage) },
  { title: "last progress", number: true, cell: (engine) => (engine.progress_age == null ? NOT_KNOWN : `${seconds(engine.progress_age)} ago`) },
  { title: "slots from", cell: (engine) => engine.slots_from ?? NOT_KNOWN },
  { title: "queue age from", cell: (engine) => engine.queue_age_from ?? NOT_KNOWN },
  { title: "pending", number: true, cell: (engine) => count(engine.tokens.pending) },
  { title: "unattributed", number: true, cell: (engine) => count(engine.tokens.unattributed) },
  { title: "past its deadline", number: true, cell: (engine) => seconds(engine.breach_seconds) },
  { title: "restarts", number: true, cell: (engine) => count(engine.restarts) },
];

export function costColumns(price) {
  const paid = (cost) => quantity(cost.orphan_gpu_seconds == null ? null : (cost.orphan_gpu_seconds * price.per_hour) / 3600, 1, price.currency, 2);
  return [
    { title: "engine", cell: (engine) => engine.name },
    { title: "GPUs", cell: ({ cost }) => (cost.gpus_lost ? [`${cost.gpus_up}, ${cost.gpus_lost} lost`, "bad"] : `${cost.gpus_up}`) },
    { title: "GPU time", number: true, cell: ({ cost }) => seconds(cost.gpu_seconds) },
    { title: "of it orphans", number: true, cell: ({ cost }) => seconds(cost.orphan_gpu_seconds) },
    { title: "energy", number: true, cell: ({ cost }) => energy(cost.joules.full) },
    { title: "of it orphans", number: true, cell: ({ cost }) => energy(cost.orphan_joules.full) },
    ...(price ? [{ title: "price of orphans", number: true, cell: ({ cost }) => paid(cost) }] : []),
  ];
}

function energy(joules) {
  return joules >= 3.6e6 ? quantity(joules, 3.6e6, "kWh", 2) : quantity(joules, 1, "J");
}
