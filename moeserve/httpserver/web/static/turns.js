// What a message looks like. A view is made once for a message and shown again whenever that changes.

import { copyButton, el, number, oneDigit, seconds } from "./dom.js";
import { showMarkdown } from "./markdown.js";

/** The user's words, as they are. `edited(text)` is called with the words that replace them. */
export function userTurn(message, edited) {
  const text = el("p", { className: "words" }, message.content);
  const edit = el("button", { type: "button", className: "quiet", onclick: open }, "Edit");
  const actions = el("div", { className: "actions" }, edit, copyButton(() => message.content));
  const turn = el("li", { className: "turn user" }, el("h2", { className: "off-screen" }, "You"), text, actions);
  return { element: turn, lock: (locked) => (edit.disabled = locked) };

  function open() {
    const field = el("textarea", { value: message.content, rows: 3, ariaLabel: "Edit the message" });
    const form = el(
      "form",
      { className: "edit", onsubmit: save, onkeydown: (event) => event.key === "Escape" && close() },
      field,
      el("div", { className: "actions" }, el("button", { type: "button", className: "quiet", onclick: close }, "Cancel"),
        el("button", { className: "primary" }, "Save and ask")),
    );
    text.hidden = actions.hidden = true;
    turn.append(form);
    field.focus();
    function save(event) {
      event.preventDefault();
      if (field.value.trim()) edited(field.value.trim());
    }
    function close() {
      form.remove();
      text.hidden = actions.hidden = false;
      edit.focus();
    }
  }
}

/** Whether an answer is still coming. */
export function isRunning({ role, state }) {
  return role === "assistant" && !["done", "stopped", "failed"].includes(state);
}

/** The model's answer: its thought, folded, its text, its figures. */
export function modelTurn(message, { regenerate, askForKey }) {
  const summary = el("summary");
  const thought = el("div", { className: "markdown" });
  const fold = el("details", { className: "thought" }, summary, thought);
  const text = el("div", { className: "markdown" });
  const bar = el("progress", { ariaLabel: "How far the prompt has been read" });
  const waiting = el("div", { className: "waiting" }, el("p"), bar);
  const error = el("div", { className: "error", role: "alert" });
  const figures = el("p", { className: "figures" });
  const again = el("button", { type: "button", className: "quiet", onclick: regenerate }, "Regenerate");
  const actions = el("div", { className: "actions" }, copyButton(() => message.content), again);
  const name = el("h2", { className: "off-screen" }, "The model");
  const turn = el("li", { className: "turn model" }, name, fold, text, waiting, error, actions, figures);
  fold.ontoggle = () => fold.open && showMarkdown(thought, message.reasoning);
  show();
  return { element: turn, show, lock: (locked) => (again.disabled = locked) };

  function show() {
    const { state } = message;
    turn.classList.toggle("running", state === "answering");
    fold.hidden = !message.reasoning;
    fold.classList.toggle("running", state === "thinking");
    summary.textContent = thoughtLine(message);
    if (fold.open) showMarkdown(thought, message.reasoning);
    showMarkdown(text, message.content);
    waiting.hidden = !["waiting", "reading"].includes(state);
    if (!waiting.hidden) showProgress(waiting.firstElementChild, bar, message);
    showError(error, message.error, askForKey);
    actions.hidden = isRunning(message);
    figures.textContent = figuresLine(message);
  }
}

function thoughtLine({ state, stats, content }) {
  const tokens = stats?.thought_tokens ? `, ${number.format(stats.thought_tokens)} tokens` : "";
  if (state === "thinking") return `Thinking${tokens}…`;
  return content ? `Thought${tokens}` : `Thought${tokens}, and said nothing`;
}

function showProgress(line, bar, { progress }) {
  if (!progress) {
    line.textContent = "Waiting…";
    bar.removeAttribute("value"); // indeterminate
    return;
  }
  const { processed, total, cache, time_ms } = progress;
  const rate = time_ms > 0 && processed > cache ? `, ${number.format(((processed - cache) / time_ms) * 1000)} tok/s` : "";
  line.textContent = `Reading the prompt: ${number.format(processed)} of ${number.format(total)} tokens${rate}`;
  bar.max = total;
  bar.value = processed;
}

function showError(box, error, askForKey) {
  box.hidden = !error;
  if (!error || box.childElementCount) return;
  const status = error.status >= 400 ? `Error ${error.status}: ` : "";
  box.append(el("p", {}, status + error.text));
  if (error.status === 401) box.append(el("button", { type: "button", onclick: askForKey }, "Enter an API key"));
}

/** 48 tokens · 31.2 tok/s · first after 0.21 s · prompt 812 tokens, 640 cached, 402 tok/s · stopped */
function figuresLine({ stats, state, finish }) {
  const parts = [];
  if (stats?.tokens) {
    parts.push(`${number.format(stats.tokens)} tokens`);
    if (stats.rate) parts.push(`${oneDigit.format(stats.rate)} tok/s`);
    if (stats.first_token_ms !== undefined) parts.push(`first after ${seconds(stats.first_token_ms)}`);
    const cached = stats.cached_tokens ? `, ${number.format(stats.cached_tokens)} cached` : "";
    const rate = stats.prompt_rate ? `, ${number.format(stats.prompt_rate)} tok/s` : "";
    parts.push(`prompt ${number.format(stats.prompt_tokens)} tokens${cached}${rate}`);
  }
  if (state === "stopped") parts.push("stopped");
  if (finish === "length") parts.push("cut off at the most tokens allowed");
  return parts.join(" · ");
}
