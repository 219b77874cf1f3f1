// The live page: asks for /api/now once a beat and shows it. It says so when the exporter, or its beat, stands still.
import { Chart } from "./chart.js";
import { NOT_KNOWN, Table, count, element, keep, percent, quantity, seconds, setClass, setText, sum } from "./dom.js";
import { ENGINE_COLUMNS, costColumns, more, showCards } from "./engines.js";
import { showHops } from "./hops.js";

const PATIENCE = 5000; // milliseconds for an answer
const at = (id) => document.getElementById(id);
const path = location.pathname.replace(/.*\//, "/"); // without the prefix under which a proxy may serve all this
const ROWS = path === "/streams" ? 500 : 50;
const CARDS = path === "/" ? 12 : 50;

const streams = new Table(at("stream-table"), "Streams in flight", [
  { title: "client", cell: (row) => [row.client, row.client_connected ? (row.client === "stalled" ? "warn" : "") : "bad"] },
  { title: "age", number: true, cell: (row) => seconds(row.age_seconds) },
  { title: "came in at", spare: true, cell: (row) => row.hop },
  { title: "leaks at", cell: (row) => [row.leaks_at ?? "", "bad"] },
  { title: "engine", spare: true, cell: (row) => row.engine ?? NOT_KNOWN },
  { title: "tokens", number: true, spare: true, cell: (row) => count(row.tokens) },
  { title: "useful", number: true, spare: true, cell: (row) => count(row.useful) },
  { title: "for nobody", number: true, cell: (row) => count(row.orphaned) },
  { title: "slack", number: true, cell: (row) => slack(row) },
  { title: "from", spare: true, cell: (row) => row.client_address ?? NOT_KNOWN },
], (row) => (row.client_connected ? "" : "bad"));

function slack(row) {
  if (row.deadline_slack_seconds == null) return row.first_byte ? "answering" : "no deadline";
  return [seconds(row.deadline_slack_seconds), row.deadline_slack_seconds < 0 ? "bad" : ""];
}

const engines = new Table(at("engine-table"), "Engines", ENGINE_COLUMNS);

const gpus = new Table(at("gpu-table"), "GPUs", [
  { title: "GPU", cell: ({ row }) => `${row.index} ${row.name} (${row.uuid})` },
  { title: "state", cell: ({ up, row }) => (up ? "up" : up == null ? NOT_KNOWN : [row.reason ?? "lost", "bad"]) },
  { title: "engine", cell: (gpu) => gpu.engines.join(", ") || NOT_KNOWN },
  { title: "utilization", number: true, cell: ({ row }) => percent(row.utilization) },
  { title: "memory", number: true, cell: ({ row }) => memory(row) },
  { title: "power", number: true, cell: ({ row }) => quantity(row.power, 1, "W") },
  { title: "temperature", number: true, cell: ({ row }) => quantity(row.temperature, 1, "°C") },
  { title: "clock", number: true, cell: ({ row }) => quantity(row.sm_clock, 1e6, "MHz") },
  { title: "trouble", cell: (gpu) => [gpuTrouble(gpu), "bad"] },
]);

function memory(row) {
  if (row.memory_used == null || row.memory_total == null) return row.unified_memory ? "the host's" : NOT_KNOWN;
  return `${quantity(row.memory_used, 2 ** 30, "", 1)}of ${quantity(row.memory_total, 2 ** 30, "GiB", 1)}`;
}

function gpuTrouble({ row, xids, latched }) {
  const trouble = Object.entries(xids).map(([code, xid]) => `XID ${code} (${xid.incidents})`);
  trouble.push(...(row.throttling ?? []).map((reason) => `slowed down: ${reason}`));
  if (latched) trouble.push("utilization latched");
  if (row.recovery_action && row.recovery_action !== "none") trouble.push(`wants: ${row.recovery_action}`);
  return trouble.join(", ");
}

const proxies = new Table(at("proxy-table"), "What proxies tell", [
  { title: "hop", cell: (proxy) => proxy.hop },
  { title: "proxy", cell: (proxy) => (proxy.stale ? [`${proxy.program}: its count has leaked`, "bad"] : proxy.program || NOT_KNOWN) },
  { title: "streams", number: true, cell: (proxy) => count(proxy.streams) },
  { title: "queued", number: true, cell: (proxy) => count(proxy.queued) },
  { title: "oldest queued", number: true, cell: (proxy) => seconds(proxy.oldest_queued) },
  { title: "HTTP/2 connections", number: true, cell: (proxy) => count(proxy.h2_connections) },
  { title: "HTTP/2 streams", number: true, cell: (proxy) => count(proxy.h2_streams) },
  { title: "clients left", number: true, cell: (proxy) => count(proxy.client_aborts) },
  { title: "resets", number: true, cell: (proxy) => count(proxy.resets) },
]);

const blind = new Table(at("blind-table"), "Blind spots", [
  { title: "hop", cell: (spot) => spot.hop },
  { title: "what", cell: (spot) => spot.kind },
  { title: "why", cell: (spot) => spot.why },
]);

const sources = new Table(at("source-table"), "Sources", [
  { title: "source", cell: (source) => source.source },
  { title: "target", cell: (source) => source.target },
  { title: "state", cell: (source) => [source.state, source.state === "down" ? "bad" : ""] },
  { title: "took", number: true, spare: true, cell: (source) => quantity(source.seconds, 1e-3, "ms") },
  { title: "detail", cell: (source) => source.detail },
]);

const chart = new Chart(at("chart"), at("legend"), at("chart-scale"));
const TROUBLES = 8; // sentences that are shown: more of them nobody reads
const ALL_WELL = { says: "No engine is in trouble and no hop leaks." };
let last = null; // the newest answer
let changed = 0; // when its beat was first seen, by this browser's clock

function show(now, history) {
  showTroubles(now);
  document.title = now.troubles_in_all ? `(${now.troubles_in_all}) tokengap` : "tokengap";
  const cards = now.engines.slice(0, CARDS);
  showCards(at("cards"), cards, now.limits);
  showMore("engines-more", more(now.engine_states, cards));
  setClass(at("front"), path === "/" && cards.length <= 2 ? "few" : "");
  showHops(at("hops"), now);
  if (history) chart.draw(history, now.rates);
  streams.show(now.streams.rows);
  setText(at("counted"), counted(now));
  engines.show(now.engines);
  showCost(now);
  showGpus(now.gpus);
  showSome("proxies", proxies, now.proxies);
  showSome("blind", blind, now.blind_spots);
  sources.show(now.sources);
  const unseen = sum(now.source_states) - now.sources.length;
  showMore("sources-more", unseen ? `And ${count(unseen)} more: see /api/sources. ${count(now.source_states.down ?? 0)} of all are down.` : "");
  setText(at("beats"), `Beat ${count(now.beats)}, every ${now.interval} s; ${now.late_beats} late, ${now.degraded_beats} degraded. Accounting: ${now.accounting}.`);
}

function showTroubles(now) {
  const troubles = now.troubles.length ? now.troubles.slice(0, TROUBLES) : [ALL_WELL];
  const others = now.troubles_in_all - TROUBLES;
  if (others > 0) troubles.push({ says: `And ${count(others)} more: see the engines.`, runbook: "decision-matrix" });
  keep(at("troubles"), troubles, () => element("li", {}, element("span"), " ", element("a")), (line, { says, runbook }) => {
    const [sentence, link] = line.children;
    setClass(line, runbook ? "bad" : "");
    setText(sentence, says);
    setText(link, runbook ? "What to do" : "");
    link.href = `runbooks/${runbook}`;
    link.hidden = !runbook;
  });
}

function counted({ streams: { matching, rows }, accounting }) {
  if (accounting === "none") return "not known: no sockets can be read";
  return rows.length < matching ? `the first ${count(rows.length)} of ${count(matching)}` : `${count(matching)}`;
}

function showMore(id, says) {
  at(id).hidden = !says;
  setText(at(id), says);
}

// Shows a table with its section, or neither where it has no rows.
function showSome(id, table, rows) {
  const section = at(id);
  section.hidden = !rows.length || !onThisPage(section);
  table.show(rows);
}

let cost = null;
function showCost(now) {
  cost ??= new Table(at("cost-table"), "What orphans cost", costColumns(now.price));
  showSome("cost", cost, now.engines.filter((engine) => engine.cost));
}

function showGpus(read) {
  const rows = read?.gpus ?? [];
  showSome("gpus", gpus, rows);
  if (rows.length || path !== "/gpus") return;
  at("gpus").hidden = false;
  at("gpu-table").hidden = true;
  at("gpus-none").hidden = false;
  setText(at("gpus-none"), read ? `None: ${read.detail || read.reason}.` : "They are not asked for (--no-gpu).");
}

function onThisPage(section) {
  return section.dataset.on.split(" ").includes(path);
}

async function ask(address) {
  const answer = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  if (!answer.ok) throw new Error(`it says ${answer.status}: ${(await answer.text()).trim()}`);
  return answer.json();
}

function nowAddress() {
  const form = new FormData(at("choice"));
  const query = new URLSearchParams({ sort: form.get("sort"), top: path === "/" || path === "/streams" ? ROWS : 0 });
  for (const client of form.get("client").split(" ").filter(Boolean)) query.append("client", client);
  return `api/now?${query}`;
}

async function take() {
  const [now, history] = await Promise.all([ask(nowAddress()), path === "/" ? ask("api/history") : null]);
  if (now.version !== document.body.dataset.version) location.reload();
  if (!last || now.beats !== last.beats) changed = performance.now();
  last = now;
  show(now, history);
}

function complain(says) {
  document.body.classList.toggle("stale", Boolean(says));
  at("broken").hidden = !says;
  setText(at("broken"), says);
}

function clock() {
  return new Date(last.wall * 1000).toLocaleTimeString("en-GB");
}

function sinceWhen() {
  return last ? `What is shown is of ${clock()}.` : "Nothing is shown yet.";
}

async function poll() {
  try {
    await take();
    const still = (performance.now() - changed) / 1000;
    complain(still > 3 * last.interval + 2 ? `The exporter answers, but its beat stands still. ${sinceWhen()}` : "");
    setText(at("beat"), `live, ${clock()}`);
  } catch (error) {
    const why = error.message.startsWith("it says") ? error.message : "no answer";
    complain(`The exporter does not tell: ${why}. ${sinceWhen()} Asking again every second.`);
    setText(at("beat"), last ? `last heard of at ${clock()}` : "not heard of yet");
  }
}

let timer = 0;
async function beat() {
  clearTimeout(timer);
  if (document.hidden) return; // nobody looks: begins again when somebody does
  await poll();
  clearTimeout(timer);
  timer = setTimeout(beat, last && !document.body.classList.contains("stale") ? Math.max(1000 * last.interval, 500) : 1000);
}

for (const section of document.querySelectorAll("section[data-on]")) section.hidden ||= !onThisPage(section);
for (const link of document.querySelectorAll("nav a")) if (link.pathname === location.pathname) link.setAttribute("aria-current", "page");
at("choice").addEventListener("change", beat);
at("choice").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("visibilitychange", beat);
beat();
