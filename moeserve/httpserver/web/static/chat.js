// The chat page: a conversation, the request that its last message makes, and the answer to it.

import { streamChat } from "./api.js";
import { receive } from "./answer.js";
import { byId, el, number } from "./dom.js";
import { askForKey, awaitModel, setUpKeyDialog, setUpTheme } from "./page.js";
import { requestFields, setUpSettings } from "./settings.js";
import { isRunning, modelTurn, userTurn } from "./turns.js";

const STORE = "moeserve.conversation"; // of this tab

let messages = []; // {role, content}; of the model also reasoning, state, stats, finish, error
let views = []; // of each message
let running = null; // the AbortController of the answer that is coming

const log = byId("log");
const composer = byId("composer");
const words = byId("words");

function show() {
  views = messages.map((message, i) =>
    message.role === "user"
      ? userTurn(message, (text) => ask(text, i))
      : modelTurn(message, { regenerate: () => ask(messages[i - 1].content, i - 1), askForKey }),
  );
  log.replaceChildren(...views.map((view) => view.element));
  byId("welcome").hidden = messages.length > 0;
  byId("new-chat").disabled = messages.length === 0;
}

/** Asks with `text` as the message at `place`; what stood there and after it is gone. */
async function ask(text, place = messages.length) {
  if (running !== null) return;
  const answer = { role: "assistant", content: "", reasoning: "", state: "waiting" };
  messages = [...messages.slice(0, place), { role: "user", content: text }, answer];
  show();
  scrollToEnd();
  running = new AbortController();
  setRunning(true);
  keep();
  const view = views.at(-1);
  let frame = 0; // pieces that come within one frame are drawn together
  await receive(streamChat(bodyOf(messages.slice(0, -1)), running.signal), answer, running.signal, () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      keepingTheEndInSight(() => view.show());
    });
  });
  cancelAnimationFrame(frame);
  keepingTheEndInSight(() => view.show());
  running = null;
  setRunning(false);
  byId("status").textContent = { done: "The answer is complete.", stopped: "Stopped.", failed: "" }[answer.state];
  keep();
}

function bodyOf(history) {
  const { fields, system } = requestFields();
  const turns = history.filter((message) => message.content || message.role === "user");
  return {
    ...fields,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns.map(forRequest)],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_progress: true,
  };
}

function forRequest({ role, content, reasoning }) {
  return reasoning ? { role, content, reasoning_content: reasoning } : { role, content };
}

function setRunning(isOn) {
  byId("send").hidden = isOn;
  byId("stop").hidden = !isOn;
  byId("conversation").ariaBusy = isOn; // so that a screen reader reads an answer when it is whole
  byId("status").textContent = isOn ? "The model is answering." : "";
  for (const view of views) view.lock(isOn);
  if (!isOn && document.activeElement === document.body) words.focus();
}

// ---------------------------------------------------------------- scrolling

const scroller = byId("scroller");

function scrollToEnd() {
  scroller.scrollTop = scroller.scrollHeight;
}

/** Follows the answer as it grows, unless the reader has scrolled away from its end. */
function keepingTheEndInSight(change) {
  const wasAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
  change();
  if (wasAtEnd) scrollToEnd();
}

// ---------------------------------------------------------------- over a reload

function keep() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(messages));
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    sessionStorage.removeItem(STORE);
    byId("status").textContent = "This conversation is too long to be kept over a reload.";
  }
}

// ---------------------------------------------------------------- the composer

composer.onsubmit = (event) => {
  event.preventDefault();
  const text = words.value.trim();
  if (!text || running !== null) return;
  words.value = "";
  ask(text);
};
words.onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    composer.requestSubmit();
  }
};
document.onkeydown = (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
};
byId("stop").onclick = () => running?.abort();
byId("new-chat").onclick = () => {
  running?.abort();
  messages = [];
  sessionStorage.removeItem(STORE);
  show();
  words.focus();
};
for (const example of document.querySelectorAll("#welcome button")) {
  example.onclick = () => ask(example.textContent);
}

async function start() {
  setUpTheme();
  setUpSettings();
  setUpKeyDialog(awaitAndWelcome);
  messages = JSON.parse(sessionStorage.getItem(STORE) ?? "[]");
  for (const message of messages) if (isRunning(message)) message.state = "stopped"; // by the reload
  show();
  scrollToEnd();
  await awaitAndWelcome();
}

async function awaitAndWelcome() {
  const model = await awaitModel();
  if (model === null) return;
  const context = `${number.format(model.max_model_len)} tokens of context`;
  byId("welcome-model").replaceChildren(el("strong", {}, model.id), `, ${context}`);
}

await start();
