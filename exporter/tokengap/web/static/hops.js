// The way of a request: clients, then hops in columns, then engines. The hop that leaks is marked.
import { count, element, keep, seconds, setClass, setText, sum } from "./dom.js";
const [ENGINES_DRAWN, TARGETS_SAID] = [6, 6];

function people(clients) {
  const shown = Object.entries(clients).filter(([, number]) => number > 0);
  return shown.map(([state, number]) => `${count(number)} ${state}`).join(", ") || "no streams";
}

// Hops by how many hops are in front of them: those that clients call first.
export function columns(hops) {
  const depth = Object.fromEntries(hops.map((hop) => [hop.name, 0]));
  for (const hop of hops) for (const next of hop.to) if (next in depth) depth[next] = Math.max(depth[next], depth[hop.name] + 1);
  const deepest = Math.max(-1, ...Object.values(depth));
  return Array.from({ length: deepest + 1 }, (_, level) => hops.filter((hop) => depth[hop.name] === level));
}

function leak(hop) {
  const held = hop.leaking ? `${count(hop.leaking)} held for nobody, the oldest ${seconds(hop.oldest_orphan)}; ` : "";
  if (hop.leaks) return ["leaks", `▲ Leaks here: ${held}${count(hop.orphaned)} tokens so far`];
  return ["", hop.orphaned >= 1 ? `${count(hop.orphaned)} tokens for nobody so far` : ""];
}

function box(hop, many) {
  const [looks, leaks] = leak(hop);
  const to = many ? `to ${hop.to.slice(0, TARGETS_SAID).join(", ")}${hop.to.length > TARGETS_SAID ? ", ..." : ""}` : "";
  return { name: hop.name, looks, lines: [hop.listen.join(", "), people(hop.clients), to, leaks] };
}

function enginesColumn(engines, inAll, hop) {
  const [looks, leaks] = leak(hop);
  const drawn = engines.slice(0, ENGINES_DRAWN);
  const boxes = drawn.map((engine) => ({ name: engine.name, looks, lines: [engine.state, `running: ${count(engine.running)}`] }));
  if (inAll > drawn.length) boxes.push({ name: `and ${count(inAll - drawn.length)} more`, looks, lines: [] });
  const direct = Object.values(hop.clients).some(Boolean) ? `at the engine itself: ${people(hop.clients)}` : "";
  boxes.at(-1)?.lines.push(direct, leaks);
  return boxes;
}

export function showHops(place, now) {
  const hops = now.hops.slice(0, -1);
  const engine = now.hops.at(-1);
  const inColumns = columns(hops);
  const first = { name: "clients", looks: "", lines: [people(now.streams.clients)] };
  const shown = [
    [first],
    ...inColumns.map((column) => column.map((hop) => box(hop, column.length > 1))),
    enginesColumn(now.engines, sum(now.engine_states), engine),
  ];
  keep(place, shown, () => element("li"), (column, boxes) => {
    keep(column, boxes, () => element("div", { class: "hop" }, element("h3")), (made, { name, looks, lines }) => {
      setClass(made, `hop ${looks}`.trim());
      setText(made.firstElementChild, name);
      const texts = lines.filter(Boolean);
      while (made.children.length > texts.length + 1) made.lastElementChild.remove();
      texts.forEach((text, number) => {
        if (number + 1 >= made.children.length) made.append(element("p"));
        setText(made.children[number + 1], text);
        setClass(made.children[number + 1], text.startsWith("▲") ? "bad" : "");
      });
    });
  });
}
