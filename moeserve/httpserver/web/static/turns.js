// What a message looks like. A view is made once for a message and shown again whenever that changes.

import { aloudButton } from "./aloud.js";
import { callView } from "./call_view.js";
import { copyButton, el, number, oneDigit, seconds } from "./dom.js";
import { nameAndSize } from "./files.js";
import { thumbnail } from "./thumbnails.js";
import { showMarkdown } from "./markdown.js";

/** The user's words and files, as they are. `edited(text)` is called with the words that make another version. */
export function userTurn(message, { versions, edited }) {
  const files = (message.attachments ?? []).map(attachment);
  const text = el("p", { className: "words", hidden: !message.content }, message.content);
  const edit = el("button", { type: "button", className: "quiet", onclick: open }, "Edit");
  const switcher = versionSwitcher(versions);
  const actions = el("div", { className: "actions" }, switcher?.element ?? null, edit, copyButton(() => message.content));
  const name = el("h2", { className: "off-screen" }, "You");
  const turn = el("li", { className: "turn user" }, name, ...files, text, actions);
  return { element: turn, lock };

  function lock(locked) {
    edit.disabled = locked;
    switcher?.lock(locked);
  }

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
      if (field.value.trim() || files.length) edited(field.value.trim());
    }
    function close() {
      form.remove();
      text.hidden = !message.content;
      actions.hidden = false;
      edit.focus();
    }
  }
}

function attachment(file) {
  if (file.size !== undefined) return el("p", { className: "file" }, nameAndSize(file)); // a video
  if (file.picture) return thumbnail(file);
  const text = el("pre", { tabIndex: 0 }, file.text);
  return el("details", { className: "file" }, el("summary", {}, nameAndSize(file)), text);
}

/** ‹ 2/3 › where there are several versions of a message, else null. */
function versionSwitcher({ index, count, show }) {
  if (count < 2) return null;
  const step = (by, sign, ariaLabel) =>
    el("button", { type: "button", className: "quiet", ariaLabel, disabled: !isThere(index + by),
      onclick: () => show(index + by) }, sign);
  const isThere = (place) => place >= 0 && place < count;
  const back = step(-1, "‹", "Previous version");
  const on = step(1, "›", "Next version");
  const place = el("span", {}, `${index + 1}/${count}`);
  const lock = (locked) => {
    back.disabled = locked || !isThere(index - 1);
    on.disabled = locked || !isThere(index + 1);
  };
  return { element: el("span", { className: "versions" }, back, place, on), lock };
}

/** Whether an answer is still coming. */
export function isRunning({ role, state }) {
  return role === "assistant" && !["done", "stopped", "failed"].includes(state);
}

/** Whether an answer has begun and ended too early, so that it can go on. */
function isCutOff({ state, finish, content }) {
  return content !== "" && (state === "stopped" || state === "failed" || finish === "length");
}

/** The model's answer: its thought, folded, its text, its calls of tools, its figures. */
export function modelTurn(message, { versions, isLast, regenerate, goOn, askForKey, decided }) {
  const summary = el("summary");
  const thought = el("div", { className: "markdown" });
  const fold = el("details", { className: "thought" }, summary, thought);
  const text = el("div", { className: "markdown" });
  const bar = el("progress", { ariaLabel: "How far the prompt has been read" });
  const waiting = el("div", { className: "waiting" }, el("p"), bar);
  const error = el("div", { className: "error", role: "alert" });
  const figures = el("p", { className: "figures" });
  const again = el("button", { type: "button", className: "quiet", onclick: regenerate }, "Regenerate");
  const further = el("button", { type: "button", className: "quiet", onclick: goOn }, "Continue");
  const switcher = versionSwitcher(versions);
  const actions = el("div", { className: "actions" }, switcher?.element ?? null, copyButton(() => message.content), aloudButton(() => text),
    again, further);
  const name = el("h2", { className: "off-screen" }, "The model");
  const calls = el("div");
  let callViews = [];
  const turn = el("li", { className: "turn model" }, name, fold, text, calls, waiting, error, actions, figures);
  fold.ontoggle = () => fold.open && showMarkdown(thought, message.reasoning);
  show();
  return { element: turn, show, lock };

  function lock(locked) {
    again.disabled = further.disabled = locked;
    switcher?.lock(locked);
    for (const view of callViews) view.lock(locked);
  }

  function show() {
    const { state } = message;
    turn.classList.toggle("running", state === "answering");
    fold.hidden = !message.reasoning;
    fold.classList.toggle("running", state === "thinking");
    summary.textContent = thoughtLine(message);
    if (fold.open) showMarkdown(thought, message.reasoning);
    showMarkdown(text, message.content);
    showCalls();
    waiting.hidden = !["waiting", "reading"].includes(state);
    if (!waiting.hidden) showProgress(waiting.firstElementChild, bar, message);
    showError(error, message.error, askForKey);
    actions.hidden = isRunning(message);
    further.hidden = !isLast || !isCutOff(message);
    figures.textContent = figuresLine(message);
  }

  function showCalls() {
    for (const call of (message.calls ?? []).slice(callViews.length)) {
      const view = callView(call, decided);
      callViews = [...callViews, view];
      calls.append(view.element);
    }
    for (const view of callViews) view.show();
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
  if (progress.loading) {
    line.textContent = `The model is loading: ${progress.loading}`;
    bar.max = 100;
    bar.value = Number.parseFloat(/(\d+)%/.exec(progress.loading)?.[1] ?? "0");
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
  if (!error) box.replaceChildren();
  if (!error || box.childElementCount) return;
  const status = error.status >= 400 ? `Error ${error.status}: ` : "";
  box.append(el("p", {}, status + error.text));
  if (error.status === 401) box.append(el("button", { type: "button", onclick: askForKey }, "Enter an API key"));
}

/** 48 tokens · 31.2 tok/s · first after 0.21 s · prompt 812 tokens, 640 cached, 402 tok/s · stopped */
function figuresLine({ stats, state, finish, model }) {
  const parts = model ? [model] : []; // where there are several
  if (stats?.tokens) {
    parts.push(`${number.format(stats.tokens)} ${stats.tokens === 1 ? "token" : "tokens"}`);
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
