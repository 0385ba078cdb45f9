// The page of the experts: asks the server for its counts every other second and shows them.

import { getJson, getText } from "./api.js";
import { byId, el, number, oneDigit, say } from "./dom.js";
import { HeatMap, drawLegend } from "./heatmap.js";
import { awaitModel, setUpKeyDialog, setUpTheme } from "./page.js";

const POLL_MS = 2000;
const NAMED = 8; // of the hottest experts of a layer, in the table

let use = null; // what /v1/experts said last
let before = null; // and the time before that
let order = []; // of each layer: the expert shown in each column

const map = new HeatMap(byId("canvas"), describe);

function show() {
  order = use.counts.map((counts) => {
    const ids = counts.map((_, expert) => expert);
    return byId("order").value === "heat" ? ids.sort((a, b) => counts[b] - counts[a]) : ids;
  });
  const onGpu = use.gpu_experts.map((ids) => new Set(ids));
  const most = Math.max(...use.counts.map((counts) => Math.max(...counts)));
  const ofLayer = byId("scale").value === "layer";
  const values = order.map((ids, layer) => {
    const hottest = ofLayer ? Math.max(...use.counts[layer]) : most;
    // The root, since few experts take most: in proportion, nearly all would look cold.
    return ids.map((expert) => (hottest ? Math.sqrt(use.counts[layer][expert] / hottest) : 0));
  });
  map.show(values, order.map((ids, layer) => ids.map((expert) => onGpu[layer].has(expert))));
  byId("most").textContent = ofLayer ? "the layer's hottest" : `${number.format(most)} tokens`;
  showTotals(onGpu);
  showLayers(onGpu);
  if (map.cursor) describe(...map.cursor);
}

function showTotals(onGpu) {
  const tokens = Math.max(...use.counts.map(sum)) / use.experts_per_token;
  const resident = sum(onGpu.map((ids) => ids.size));
  const routed = sum(use.counts.map(sum));
  const served = sum(use.counts.map((counts, layer) => sum(counts.filter((_, expert) => onGpu[layer].has(expert)))));
  const hasGpu = resident > 0 || Boolean(use.expert_cache);
  byId("of-gpu").hidden = !hasGpu;
  const ofGpu = [
    ["In GPU memory", `${number.format(resident)} of ${number.format(use.layers * use.experts)}`],
    use.expert_cache ? ["Hits of the cache", hits()] : ["Served by the GPU", percent(served, routed)],
  ];
  const rows = [
    ["Layers", number.format(use.layers)],
    ["Experts in each", `${use.experts}, ${use.experts_per_token} for a token`],
    ["Tokens routed", number.format(tokens)],
    ...(hasGpu ? ofGpu : []),
    ...(use.expert_cache ? [["Promotions", promotions()]] : []),
  ];
  byId("totals").replaceChildren(...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** Of the cache of experts: lately, which is since the page last asked, and since the start. */
function hits() {
  const { hits, misses } = use.expert_cache;
  const lately = since("hits") + since("misses");
  const all = `${percent(hits, hits + misses)} of all`;
  return lately ? `${percent(since("hits"), lately)} lately, ${all}` : all;
}

function promotions() {
  const { promotions: all, bytes } = use.expert_cache;
  const gigabytes = `${oneDigit.format(bytes / 1e9)} GB`;
  return `${number.format(all)}, ${gigabytes}; ${number.format(since("promotions"))} lately`;
}

function since(name) {
  const then = before?.expert_cache?.[name] ?? 0;
  const now = use.expert_cache[name];
  return now < then ? now : now - then; // less: the engine was started again
}

function showLayers(onGpu) {
  const wanted = Math.min(Number(byId("hottest").value) || use.experts_per_token, use.experts);
  const even = percent(wanted, use.experts);
  byId("share-hint").textContent = `What the ${wanted} hottest experts of a layer take; spread evenly it would be ${even}.`;
  const rows = use.counts.map((counts, layer) => {
    const ranked = counts.map((count, expert) => [count, expert]).sort((a, b) => b[0] - a[0]);
    const total = sum(counts);
    const hottest = sum(ranked.slice(0, wanted).map(([count]) => count));
    const served = sum([...onGpu[layer]].map((expert) => counts[expert]));
    const names = total ? ranked.slice(0, Math.min(wanted, NAMED)).map(([, expert]) => expert).join(", ") : "";
    const share = [bar(total ? hottest / total : 0), percent(hottest, total)];
    const cells = [layer, number.format(total), share, onGpu[layer].size, percent(served, total), names];
    return el("tr", {}, ...cells.map((cell) => el("td", {}, ...[cell].flat())));
  });
  byId("layers").replaceChildren(...rows);
}

function bar(share) {
  const filled = el("span");
  filled.style.width = `${100 * share}%`;
  return el("span", { className: "bar", ariaHidden: "true" }, filled);
}

/** What stands under the map, for the cell that is pointed at. */
function describe(layer, column) {
  if (layer === null) {
    say(byId("reading"), "Point at an expert, or use the arrow keys.");
    return;
  }
  const expert = order[layer][column];
  const count = use.counts[layer][expert];
  const gpu = use.expert_gpus[layer][expert];
  const several = use.expert_gpus.some((of) => of.some((number) => number > 0));
  const place = gpu < 0 ? "CPU" : several ? `GPU ${gpu}` : "GPU";
  const share = percent(count, sum(use.counts[layer]));
  say(byId("reading"), `Layer ${layer}, expert ${expert}: ${number.format(count)} tokens, ${share} of the layer, on ${place}`);
}

function percent(part, whole) {
  return whole ? `${oneDigit.format((100 * part) / whole)}%` : "–";
}

function sum(numbers) {
  return numbers.reduce((total, one) => total + one, 0);
}

// ---------------------------------------------------------------- asking

/** Shows what went wrong. */
async function trying(action) {
  try {
    await action();
    byId("problem").hidden = true;
    return true;
  } catch (error) {
    byId("problem").hidden = false;
    say(byId("problem"), error.message);
    return false;
  }
}

async function refresh() {
  [before, use] = [use, await getJson("v1/experts")];
  byId("hottest").max = use.experts;
  byId("hottest").value ||= use.experts_per_token;
  show();
}

async function poll() {
  for (;;) {
    const isWanted = byId("live").checked && document.visibilityState === "visible" && !document.querySelector("dialog[open]");
    if (isWanted) await trying(refresh);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

/** The file as the server wrote it; fetched, since a plain link would not send the API key. */
async function download() {
  const address = URL.createObjectURL(new Blob([await getText("v1/experts/heat")], { type: "application/json" }));
  el("a", { href: address, download: `${use.model}.heat.json` }).click();
  URL.revokeObjectURL(address);
}

byId("download").onclick = () => trying(download);
byId("view").onsubmit = (event) => event.preventDefault();
byId("view").oninput = () => use && show();

setUpTheme();
setUpKeyDialog(async () => (await awaitModel()) && (await trying(refresh)));
drawLegend(byId("legend"));
await awaitModel();
await poll();
