// The chat page: the conversation that is shown, the requests that it makes, and the answers to them.

import { RequestFailed, streamChat } from "./api.js";
import { receive } from "./answer.js";
import { messagesOf, REFUSED } from "./chat_message.js";
import { setUpComposer } from "./composer.js";
import { showContext } from "./context_meter.js";
import { add, choose, newConversation, parentOf, path, versionsOf } from "./conversation.js";
import { byId, el, number } from "./dom.js";
import { chosenModel, modelField, setUpModels } from "./models.js";
import { notice } from "./notice.js";
import { askForKey, awaitModel, setUpKeyDialog, setUpTheme } from "./page.js";
import { keepPictures } from "./picture_store.js";
import { requestFields, setUpSettings } from "./settings.js";
import { setUpSidebar } from "./sidebar.js";
import { keep, lastShown, setShown } from "./store.js";
import { callTool, setUpTools, targetOf, toolField } from "./tools.js";
import { isRunning, modelTurn, userTurn } from "./turns.js";

const KEEP_MS = 2000; // how often an answer is kept while it comes

let conversation = newConversation();
let views = []; // of each message that is shown
let running = null; // {controller, end}: of the answer that is coming
let sidebar;
let composer;
let models;

const log = byId("log");

function show() {
  const messages = path(conversation);
  views = messages.map((message, i) => {
    const versions = versionsFor(message);
    return message.role === "user"
      ? userTurn(message, { versions, edited: (text) => edit(message, text) })
      : modelTurn(message, {
          versions,
          isLast: i === messages.length - 1,
          regenerate: () => regenerate(message),
          goOn: () => goOn(message),
          askForKey,
          decided: (call, isAllowed) => decide(message, call, isAllowed),
        });
  });
  log.replaceChildren(...views.map((view) => view.element));
  byId("welcome").hidden = messages.length > 0;
  showContext(messages, chosenModel()?.max_model_len);
  byId("new-chat").disabled = messages.length === 0;
}

function versionsFor(message) {
  const all = versionsOf(conversation, message);
  const showVersion = (index) => {
    choose(conversation, all[index]);
    setShown(conversation);
    show();
    keepOrSay(conversation);
  };
  return { index: all.indexOf(message), count: all.length, show: showVersion };
}

// ---------------------------------------------------------------- what can be asked for

const FRESH = { content: "", reasoning: "", state: "waiting" };

function ask(parent, content, attachments) {
  if (running !== null) return;
  const question = add(conversation, parent, { role: "user", content, attachments });
  return answer(add(conversation, question, { role: "assistant", ...FRESH }));
}

function edit(message, text) {
  return ask(parentOf(conversation, message), text, message.attachments ?? []);
}

/** Another version of an answer; one that failed before it said anything is replaced. */
function regenerate(message) {
  if (message.state !== "failed" || message.content || message.reasoning) {
    return answer(add(conversation, parentOf(conversation, message), { role: "assistant", ...FRESH }));
  }
  forgetEnd(message);
  return answer(Object.assign(message, FRESH));
}

function goOn(message) {
  forgetEnd(message);
  message.state = "waiting";
  return answer(message, { continue_final_message: true, add_generation_prompt: false });
}

/** The user's word about a call of a tool. When there is one about each of an answer's calls, the model is told the
 *  results. */
async function decide(message, call, isAllowed) {
  if (running !== null || call.result) return;
  const of = conversation;
  if (isAllowed) {
    const controller = new AbortController();
    running = { controller, end: called(call, controller.signal) };
    setRunning(true, "The tool is running.");
    show();
    await running.end;
    running = null;
    setRunning(false);
  } else {
    call.result = { text: REFUSED, isError: false, isRefused: true };
  }
  await keepOrSay(of);
  if (of !== conversation) return;
  show();
  const isAnswered = message.calls.every(({ result }) => result);
  if (isAnswered && message === path(of).at(-1)) await answer(add(of, message, { role: "assistant", ...FRESH }));
}

async function called(call, signal) {
  call.server = targetOf(call.name)?.server;
  call.isRunning = true;
  try {
    call.result = await callTool(call, signal);
  } catch (error) {
    if (error.name !== "AbortError") throw error; // stopped: it can be allowed again
  } finally {
    delete call.isRunning;
  }
}

function forgetEnd(message) {
  for (const name of ["error", "finish", "stats", "calls"]) delete message[name];
}

/** Asks the server for `message`, the last that is shown. With `fields` that say so it goes on from what it has. */
async function answer(message, fields = {}) {
  const of = conversation; // another may be shown before this one is answered
  const messages = path(of);
  const history = fields.continue_final_message ? messages : messages.slice(0, -1);
  show();
  scrollToEnd();
  const controller = new AbortController();
  Object.assign(message, modelField());
  const end = run(of, message, chunksOf(history, fields, controller.signal), controller.signal);
  running = { controller, end };
  setRunning(true);
  await end;
}

async function* chunksOf(history, fields, signal) {
  yield* streamChat({ ...(await bodyOf(history)), ...fields }, signal);
}

async function run(of, message, chunks, signal) {
  const view = () => (of === conversation ? views.at(-1) : null);
  let isLoadSeen = false;
  const draw = () => {
    if (message.progress?.loading && !isLoadSeen) {
      isLoadSeen = true;
      refreshModels();
    }
    keepingTheEndInSight(() => view()?.show());
    if (of === conversation) showContext(path(of), chosenModel()?.max_model_len);
  };
  let frame = 0; // pieces that come within one frame are drawn together
  of.updated = Date.now();
  setShown(of);
  await keepOrSay(of);
  sidebar.refresh();
  const timer = setInterval(() => keepOrSay(of), KEEP_MS);
  await receive(chunks, message, signal, () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      draw();
    });
  });
  clearInterval(timer);
  cancelAnimationFrame(frame);
  draw();
  await keepOrSay(of);
  running = null;
  setRunning(false);
  if (modelField().model) refreshModels(); // another may have been unloaded for it
  byId("status").textContent = { done: "The answer is complete.", stopped: "Stopped.", failed: "" }[message.state];
}

/** The list says which models are loaded. Where the server is gone it stays as it is: the next question says so. */
function refreshModels() {
  models.refresh().catch((error) => {
    if (!(error instanceof RequestFailed)) throw error;
  });
}

async function keepOrSay(of) {
  const isKept = (await keepPictures()) && (await keep(of));
  if (!isKept) notice("There is no room in this browser to keep this conversation.");
}

async function bodyOf(history) {
  const { fields, system } = requestFields();
  const turns = history.filter((message) => message.content || message.calls?.length || message.role === "user");
  return {
    ...modelField(),
    ...(await toolField()),
    ...fields,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...(await Promise.all(turns.map(messagesOf))).flat()],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_progress: true,
  };
}

function setRunning(isOn, words = "The model is answering.") {
  byId("send").hidden = isOn;
  byId("stop").hidden = !isOn;
  byId("conversation").ariaBusy = isOn; // so that a screen reader reads an answer when it is whole
  byId("status").textContent = isOn ? words : "";
  for (const view of views) view.lock(isOn);
  if (!isOn && document.activeElement === document.body) byId("words").focus();
}

async function stop() {
  running?.controller.abort();
  await running?.end;
}

/** Shows another conversation; an answer that is coming is stopped, and kept so far. */
async function open(next) {
  await stop();
  conversation = next;
  setShown(next.messages.length ? next : null);
  for (const message of next.messages) {
    if (isRunning(message)) message.state = "stopped"; // when its page was closed
    for (const call of message.calls ?? []) delete call.isRunning;
  }
  show();
  scrollToEnd();
  await sidebar.refresh();
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

// ---------------------------------------------------------------- the start

document.onkeydown = (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
};
byId("stop").onclick = stop;
byId("new-chat").onclick = async () => {
  await open(newConversation());
  byId("words").focus();
};
for (const example of document.querySelectorAll("#welcome button")) {
  example.onclick = () => ask(null, example.textContent, []);
}

async function start() {
  setUpTheme();
  setUpSettings();
  setUpKeyDialog(awaitAndWelcome);
  composer = setUpComposer({
    send: (text, attachments) => ask(path(conversation).at(-1) ?? null, text, attachments),
    isBusy: () => running !== null,
  });
  sidebar = setUpSidebar({
    current: () => conversation,
    opened: open,
    deleted: (id) => id === conversation.id && open(newConversation()),
  });
  models = setUpModels(showModel);
  await open((await lastShown()) ?? newConversation());
  await awaitAndWelcome();
}

async function awaitAndWelcome() {
  if ((await awaitModel()) === null) return;
  try {
    await models.refresh();
    await setUpTools();
  } catch (error) {
    // A chat without tools is better than none, and a server that is gone is the next question's business.
    if (!(error instanceof RequestFailed)) throw error;
  }
  show(); // calls that wait for the user's word know now where they would go
}

function showModel(model) {
  composer.takesPictures(model.architecture.input_modalities.includes("image"));
  const most = model.max_model_len; // null: a model that is not loaded, and whose file was not read yet
  const context = most ? `, ${number.format(most)} tokens of context` : "";
  byId("welcome-model").replaceChildren(el("strong", {}, model.id), context);
  showContext(path(conversation), most);
}

await start();
