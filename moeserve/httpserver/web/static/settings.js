// The parameters of a request, as the form has them. An empty field is left out: the server's default holds.

import { byId } from "./dom.js";
import { setUpNamedValues } from "./named_values.js";

const STORE = "moeserve.settings";
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty", "presence_penalty",
  "thinking_token_budget",
];
const TEXTS = ["system", "titles", "thinking", "reasoning_effort", "extra"];
const OURS = ["messages", "stream", "stream_options", "return_progress", "n"]; // which the page itself depends on

export function setUpSettings() {
  const dialog = byId("settings");
  const form = dialog.querySelector("form");
  fill(form, stored());
  byId("open-settings").onclick = () => dialog.showModal();
  byId("settings-reset").onclick = () => fill(form, {});
  byId("settings-cancel").onclick = () => dialog.close();
  setUpNamedValues({
    id: "prompts",
    key: "moeserve.prompts",
    what: "system prompt",
    read: () => form.elements.system.value,
    use: (prompt) => (form.elements.system.value = prompt),
  });
  setUpNamedValues({
    id: "presets",
    key: "moeserve.presets",
    what: "parameter preset",
    read: () => parametersOf(form),
    use: (preset) => fill(form, { ...preset, system: form.elements.system.value, titles: form.elements.titles.value }),
  });
  form.elements.extra.oninput = () => form.elements.extra.setCustomValidity("");
  form.onsubmit = (event) => {
    event.preventDefault();
    const problem = problemOf(form.elements.extra.value);
    form.elements.extra.setCustomValidity(problem);
    if (!form.reportValidity()) return;
    localStorage.setItem(STORE, JSON.stringify(values(form)));
    dialog.close();
  };
  dialog.onclose = () => fill(form, stored()); // what was not saved is not shown as if it were
}

/** The fields of the request that the settings ask for, and the system prompt. */
export function requestFields() {
  const set = stored();
  const fields = set.extra ? JSON.parse(set.extra) : {};
  for (const name of NUMBERS) if (set[name]) fields[name] = Number(set[name]);
  if (set.reasoning_effort) fields.reasoning_effort = set.reasoning_effort;
  if (set.thinking) {
    fields.chat_template_kwargs = { ...fields.chat_template_kwargs, enable_thinking: set.thinking === "on" };
  }
  return { fields, system: set.system ?? "" };
}

export function wantsTitles() {
  return stored().titles === "model";
}

function stored() {
  return JSON.parse(localStorage.getItem(STORE) ?? "{}");
}

function values(form) {
  const entries = [...NUMBERS, ...TEXTS].map((name) => [name, form.elements[name].value.trim()]);
  return Object.fromEntries(entries.filter(([, value]) => value !== ""));
}

/** All values but the system prompt, which has a list of its own, and what is no parameter of an answer. */
function parametersOf(form) {
  const { system, titles, ...parameters } = values(form);
  return parameters;
}

function fill(form, set) {
  for (const name of [...NUMBERS, ...TEXTS]) form.elements[name].value = set[name] ?? "";
}

/** What is wrong with the text of the further fields; "" if nothing is. */
function problemOf(text) {
  if (!text.trim()) return "";
  let fields;
  try {
    fields = JSON.parse(text);
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
  if (typeof fields !== "object" || fields === null || Array.isArray(fields)) return "This must be a JSON object.";
  const taken = Object.keys(fields).filter((name) => OURS.includes(name));
  return taken.length ? `The page sets ${taken.join(", ")} by itself.` : "";
}
