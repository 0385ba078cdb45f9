// The tools of MCP servers. The server names those that may be used, and calls them; this page chooses among them, offers
// their tools to the model, and asks before each call.

import { getJson, postJson, RequestFailed } from "./api.js";
import { byId, el } from "./dom.js";

const STORE = "moeserve.tools"; // names of the servers that are used
const PLAIN = /[^A-Za-z0-9_-]/g; // what a function's name may not have
const MAX_NAME = 64; // characters of a function's name
const MAX_RESULT = 100_000; // characters of a result that the model is told

let servers = []; // [{name, box, state, tools, session}]

/** Shows the list of servers in the settings, where the operator allows any. */
export async function setUpTools() {
  const { servers: found } = await getJson("v1/mcp/servers");
  const before = new Map(servers.map((server) => [server.name, server]));
  servers = found.map(({ name }) => before.get(name) ?? newServer(name));
  byId("tools").hidden = servers.length === 0;
  byId("tool-servers").replaceChildren(...servers.map(({ row }) => row));
  await Promise.all(used().map(connect));
}

function newServer(name) {
  const box = el("input", { type: "checkbox", checked: stored().includes(name) });
  const state = el("span", { className: "hint", role: "status" });
  const row = el("li", {}, el("label", {}, box, ` ${name}`), " ", state);
  const server = { name, box, state, row, tools: null, session: null };
  box.onchange = () => {
    localStorage.setItem(STORE, JSON.stringify(servers.filter((one) => one.box.checked).map((one) => one.name)));
    state.textContent = "";
    server.tools = null;
    if (box.checked) connect(server);
  };
  return server;
}

function stored() {
  return JSON.parse(localStorage.getItem(STORE) ?? "[]");
}

function used() {
  return servers.filter(({ box }) => box.checked);
}

/** Asks a server for its tools. What goes wrong is shown beside its name. */
async function connect(server) {
  server.state.textContent = "connecting…";
  try {
    const { session, tools } = await postJson(`${pathOf(server.name)}/tools`, sessionField(server));
    Object.assign(server, { session, tools });
    server.state.textContent = `${tools.length} ${tools.length === 1 ? "tool" : "tools"}`;
    server.state.title = tools.map(({ name }) => name).join(", ");
  } catch (error) {
    if (!(error instanceof RequestFailed)) throw error;
    server.tools = null;
    server.state.textContent = error.message;
  }
}

function pathOf(name) {
  return `v1/mcp/servers/${encodeURIComponent(name)}`;
}

function sessionField({ session }) {
  return session ? { session } : {};
}

/** Functions for the model by name: {server, tool, description, input_schema}. Two of one name get their servers' names
 *  before it. */
function functions() {
  const all = used().flatMap((server) => (server.tools ?? []).map((tool) => ({ server: server.name, tool })));
  const plain = ({ tool }) => tool.name.replace(PLAIN, "_").slice(0, MAX_NAME);
  const found = new Map();
  for (const one of all) {
    const isAlone = all.filter((other) => plain(other) === plain(one)).length === 1;
    const name = isAlone ? plain(one) : `${one.server}_${plain(one)}`.slice(0, MAX_NAME);
    found.set(name, { server: one.server, tool: one.tool.name, ...described(one.tool) });
  }
  return found;
}

function described({ description, input_schema }) {
  return { description, parameters: input_schema };
}

/** The request's field of tools; none where none is used. Servers that could not be reached are asked again. */
export async function toolField() {
  await Promise.all(used().filter(({ tools }) => tools === null).map(connect));
  const tools = [...functions()].map(([name, { description, parameters }]) => ({
    type: "function",
    function: { name, description, parameters },
  }));
  return tools.length ? { tools } : {};
}

/** Where a call of the model's would go: {server, tool}; null if there is no such tool now. */
export function targetOf(name) {
  return functions().get(name) ?? null;
}

/** Calls a tool; returns {text, isError}, what the model is told. */
export async function callTool(call, signal) {
  const target = targetOf(call.name);
  if (target === null) return { text: "There is no such tool.", isError: true };
  const server = servers.find(({ name }) => name === target.server);
  try {
    const body = { tool: target.tool, arguments: JSON.parse(call.arguments || "{}"), ...sessionField(server) };
    const answer = await postJson(`${pathOf(server.name)}/call`, body, signal);
    server.session = answer.session;
    return { text: textOf(answer.content), isError: answer.is_error };
  } catch (error) {
    if (error instanceof SyntaxError) return { text: `The arguments are not JSON: ${error.message}`, isError: true };
    if (!(error instanceof RequestFailed)) throw error;
    return { text: error.message, isError: true };
  }
}

function textOf(content) {
  const parts = content.map((part) => {
    if (part.type === "text") return String(part.text);
    if (part.type === "resource" && typeof part.resource?.text === "string") return part.resource.text;
    if (part.type === "resource_link") return String(part.uri);
    return `(${part.type}, ${part.mimeType ?? "of an unknown kind"}: not shown to the model)`;
  });
  const text = parts.join("\n\n");
  return text.length > MAX_RESULT ? `${text.slice(0, MAX_RESULT)}\n(cut off at ${MAX_RESULT} characters)` : text;
}
