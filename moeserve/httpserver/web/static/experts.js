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
  const [onGpu, onDisk] = [use.gpu_experts, use.disk_experts].map((layers) => layers.map((ids) => new Set(ids)));
  const most = Math.max(...use.counts.map((counts) => Math.max(...counts)));
  const ofLayer = byId("scale").value === "layer";
  const values = order.map((ids, layer) => {
    const hottest = ofLayer ? Math.max(...use.counts[layer]) : most;
    // The root, since few experts take most: in proportion, nearly all would look cold.
    return ids.map((expert) => (hottest ? Math.sqrt(use.counts[layer][expert] / hottest) : 0));
  });
  const tierOf = (layer, expert) => (onGpu[layer].has(expert) ? "gpu" : onDisk[layer].has(expert) ? "disk" : "ram");
  map.show(values, order.map((ids, layer) => ids.map((expert) => tierOf(layer, expert))));
  byId("most").textContent = ofLayer ? "the layer's hottest" : `${number.format(most)} tokens`;
  showTotals(onGpu, onDisk);
  showLayers(onGpu, onDisk);
  if (map.cursor) describe(...map.cursor);
}

function showTotals(onGpu, onDisk) {
  const tokens = Math.max(...use.counts.map(sum)) / use.experts_per_token;
  const [resident, absent] = [onGpu, onDisk].map((layers) => sum(layers.map((ids) => ids.size)));
  const all = use.layers * use.experts;
  const routed = sum(use.counts.map(sum));
  const served = sum(use.counts.map((counts, layer) => sum(counts.filter((_, expert) => onGpu[layer].has(expert)))));
  const hasGpu = resident > 0 || Boolean(use.expert_cache);
  const hasDisk = Boolean(use.expert_disk);
  byId("of-gpu").hidden = !hasGpu;
  byId("of-disk").hidden = !hasDisk;
  byId("of-ram").hidden = !hasGpu && !hasDisk;
  const ofGpu = [
    ["In GPU memory", `${number.format(resident)} of ${number.format(all)}`],
    use.expert_cache ? ["Hits of the cache", hits("expert_cache")] : ["Served by the GPU", percent(served, routed)],
  ];
  const rows = [
    ["Layers", number.format(use.layers)],
    ["Experts in each", `${use.experts}, ${use.experts_per_token} for a token`],
    ["Tokens routed", number.format(tokens)],
    ...(hasGpu ? ofGpu : []),
    ...(use.expert_cache ? [["Promotions", promotions()]] : []),
    ...(hasDisk ? [["In RAM", `${number.format(all - resident - absent)} of ${number.format(all)}`]] : []),
    ...(hasDisk ? [[hasGpu ? "RAM has of the rest" : "Found in RAM", hits("expert_disk")], ["Read from disk", reads()]] : []),
  ];
  byId("totals").replaceChildren(...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** Of a tier, "expert_cache" or "expert_disk": lately, which is since the page last asked, and since the start. */
function hits(tier) {
  const { hits, misses } = use[tier];
  const lately = since(tier, "hits") + since(tier, "misses");
  const all = `${percent(hits, hits + misses)} of all`;
  return lately ? `${percent(since(tier, "hits"), lately)} lately, ${all}` : all;
}

function reads() {
  const [all, lately] = [use.expert_disk.bytes, since("expert_disk", "bytes")].map((bytes) => oneDigit.format(bytes / 1e9));
  return `${all} GB; ${lately} GB lately`;
}

function promotions() {
  const { promotions: all, bytes } = use.expert_cache;
  const gigabytes = `${oneDigit.format(bytes / 1e9)} GB`;
  return `${number.format(all)}, ${gigabytes}; ${number.format(since("expert_cache", "promotions"))} lately`;
}

function since(tier, name) {
  const then = before?.[tier]?.[name] ?? 0;
  const now = use[tier][name];
  return now < then ? now : now - then; // less: the engine was started again
}

function showLayers(onGpu, onDisk) {
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
    const [resident, absent] = [onGpu[layer].size, onDisk[layer].size];
    const places = [resident, use.experts - resident - absent, absent];
    const cells = [layer, number.format(total), share, ...places, percent(served, total), names];
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
  const inRam = use.expert_disk ? "in RAM" : "on CPU";
  const below = use.disk_experts[layer].includes(expert) ? "on disk" : inRam;
  const place = gpu < 0 ? below : several ? `on GPU ${gpu}` : "on GPU";
  const share = percent(count, sum(use.counts[layer]));
  say(byId("reading"), `Layer ${layer}, expert ${expert}: ${number.format(count)} tokens, ${share} of the layer, ${place}`);
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
