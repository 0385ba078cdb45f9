// What a call of a tool looks like: what would be sent where, the question whether it may be, and its result.

import { el } from "./dom.js";
import { targetOf } from "./tools.js";

/** `decided(call, isAllowed)` is called with the user's answer. */
export function callView(call, decided) {
  const title = el("p", { className: "call-title" });
  const sent = el("pre", { tabIndex: 0, ariaLabel: "Arguments" });
  const allow = el("button", { type: "button", className: "primary", onclick: () => decided(call, true) }, "Allow this call");
  const refuse = el("button", { type: "button", onclick: () => decided(call, false) }, "Refuse");
  const question = el("div", { className: "actions" }, allow, refuse);
  const summary = el("summary");
  const text = el("pre", { tabIndex: 0 });
  const result = el("details", { className: "file" }, summary, text);
  const element = el("section", { className: "call", ariaLabel: "Call of a tool" }, title, sent, question, result);
  show();
  return { element, show, lock };

  function lock(locked) {
    allow.disabled = locked || targetOf(call.name) === null;
    refuse.disabled = locked;
  }

  function show() {
    const { server = targetOf(call.name)?.server, result: known } = call;
    title.textContent = server ? `${call.name}, of the MCP server ${server}` : `${call.name}: there is no such tool now`;
    sent.textContent = pretty(call.arguments);
    question.hidden = Boolean(known) || call.isRunning || !call.isWhole;
    allow.disabled = targetOf(call.name) === null;
    result.hidden = !known;
    element.classList.toggle("running", Boolean(call.isRunning));
    if (!known) return;
    summary.textContent = known.isRefused ? "Refused" : known.isError ? "Failed" : "Result";
    text.textContent = known.text;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not whole yet, or no JSON
  }
}
