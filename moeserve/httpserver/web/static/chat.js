// The chat page: the conversation that is shown, the requests that it makes, and the answers to them.

import { RequestFailed, streamChat } from "./api.js";
import { receive } from "./answer.js";
import { growing, isBusy, stopFor, whileBusy } from "./answering.js";
import { messagesOf, REFUSED } from "./chat_message.js";
import { setUpComposer } from "./composer.js";
import { showContext } from "./context_meter.js";
import { add, choose, newConversation, parentOf, path, titleOf, versionsOf } from "./conversation.js";
import { byId, el, number } from "./dom.js";
import { chosenModel, modelField, setUpModels } from "./models.js";
import { notice } from "./notice.js";
import { askForKey, awaitModel, setUpKeyDialog, setUpTheme } from "./page.js";
import { keepPictures } from "./picture_store.js";
import { requestFields, setUpSettings, wantsTitles } from "./settings.js";
import { linkedQuestion, setUpShortcuts } from "./shortcuts.js";
import { setUpSidebar } from "./sidebar.js";
import { conversationOf, keep, lastShown, setShown } from "./store.js";
import { titleByModel } from "./titles.js";
import { callTool, setUpTools, targetOf, toolField } from "./tools.js";
import { isRunning, modelTurn, userTurn } from "./turns.js";

const KEEP_MS = 2000; // how often an answer is kept while it comes

let conversation = newConversation();
let views = []; // of each message that is shown
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
  if (isBusy(conversation)) return;
  const question = add(conversation, parent, { role: "user", content, attachments });
  return answer(conversation, add(conversation, question, { role: "assistant", ...FRESH }));
}

function edit(message, text) {
  return ask(parentOf(conversation, message), text, message.attachments ?? []);
}

/** Another version of an answer; one that failed before it said anything is replaced. */
function regenerate(message) {
  if (message.state !== "failed" || message.content || message.reasoning) {
    return answer(conversation, add(conversation, parentOf(conversation, message), { role: "assistant", ...FRESH }));
  }
  forgetEnd(message);
  return answer(conversation, Object.assign(message, FRESH));
}

function goOn(message) {
  forgetEnd(message);
  message.state = "waiting";
  return answer(conversation, message, { continue_final_message: true, add_generation_prompt: false });
}

/** The user's word about a call of a tool. When there is one about each of an answer's calls, the model is told the
 *  results. */
async function decide(message, call, isAllowed) {
  const of = conversation;
  if (isBusy(of) || call.result) return;
  if (isAllowed) {
    const end = whileBusy(of, () => showBusy("The tool is running."), (signal) => called(call, signal));
    show();
    await end;
  } else {
    call.result = { text: REFUSED, isError: false, isRefused: true };
  }
  await keepOrSay(of);
  if (of === conversation) show();
  const isAnswered = message.calls.every(({ result }) => result);
  if (isAnswered && message === path(of).at(-1)) await answer(of, add(of, message, { role: "assistant", ...FRESH }));
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

/** Asks the server for `message`, the last of the conversation `of`, of which another may be shown before it is answered.
 *  With `fields` that say so it goes on from what it has. */
async function answer(of, message, fields = {}) {
  const messages = path(of);
  const history = fields.continue_final_message ? messages : messages.slice(0, -1);
  if (of === conversation) {
    show();
    scrollToEnd();
  }
  Object.assign(message, modelField());
  await whileBusy(of, showBusy, (signal) => run(of, message, chunksOf(history, fields, signal), signal));
  sidebar.refresh();
  if (modelField().model) refreshModels(); // another may have been unloaded for it
  if (message.state === "done" && messages.length === 2) giveTitle(of, messages);
  const said = { done: "The answer is complete.", stopped: "Stopped.", failed: "" }[message.state];
  if (of === conversation) {
    byId("status").textContent = said;
    composer.ended(message.state === "done" && !message.calls?.length); // calls wait for the user's word first
  } else if (message.state !== "stopped") {
    notice(`“${titleOf(of)}”: ${said || "no answer came."}`, "Show", () => openKept(of.id));
  }
}

/** In place of the first words, unless the user has named it meanwhile. */
async function giveTitle(of, history) {
  if (of.title || !wantsTitles()) return;
  const { tools, messages } = await bodyOf(history);
  const title = await titleByModel({ ...modelField(), ...(tools && { tools }), messages });
  if (!title || of.title || (await conversationOf(of.id))?.title !== "") return;
  of.title = title;
  await keepOrSay(of);
  sidebar.refresh();
}

async function openKept(id) {
  const kept = await conversationOf(id);
  if (kept) await open(kept); // it may have been deleted since
}

async function* chunksOf(history, fields, signal) {
  yield* streamChat({ ...(await bodyOf(history)), ...fields }, signal);
}

async function run(of, message, chunks, signal) {
  let isLoadSeen = false;
  const draw = () => {
    if (message.progress?.loading && !isLoadSeen) {
      isLoadSeen = true;
      refreshModels();
    }
    if (of !== conversation) return;
    keepingTheEndInSight(() => views.at(-1)?.show());
    showContext(path(of), chosenModel()?.max_model_len);
  };
  let frame = 0; // pieces that come within one frame are drawn together
  of.updated = Date.now();
  if (of === conversation) setShown(of);
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

/** Whether the conversation that is shown waits for something. */
function showBusy(words = "The model is answering.") {
  const isOn = isBusy(conversation);
  byId("send").hidden = isOn;
  byId("stop").hidden = !isOn;
  byId("conversation").ariaBusy = isOn; // so that a screen reader reads an answer when it is whole
  byId("status").textContent = isOn ? words : "";
  for (const view of views) view.lock(isOn);
  if (!isOn && document.activeElement === document.body) byId("words").focus();
}

/** Shows another conversation. An answer that is coming in this one goes on. */
async function open(next) {
  await change(next);
  composer.showDraft();
}

async function change(next) {
  conversation = growing(next.id) ?? next;
  setShown(conversation.messages.length ? conversation : null);
  if (!isBusy(conversation)) endInterrupted(conversation);
  show();
  showBusy();
  scrollToEnd();
  await sidebar.refresh();
}

/** What was coming when its page was closed. */
function endInterrupted({ messages }) {
  for (const message of messages) {
    if (isRunning(message)) message.state = "stopped";
    for (const call of message.calls ?? []) delete call.isRunning;
  }
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
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stopFor(conversation.id);
};
byId("stop").onclick = () => stopFor(conversation.id);
byId("new-chat").onclick = begin;

async function begin() {
  if (conversation.messages.length) await open(newConversation());
  byId("words").focus();
}

for (const example of document.querySelectorAll("#welcome button")) {
  example.onclick = () => ask(null, example.textContent, []);
}

async function start() {
  setUpTheme();
  setUpSettings();
  setUpKeyDialog(awaitAndWelcome);
  composer = setUpComposer({
    send: (text, attachments) => ask(path(conversation).at(-1) ?? null, text, attachments),
    isBusy: () => isBusy(conversation),
    draftId: () => (conversation.messages.length ? conversation.id : "new"),
  });
  sidebar = setUpSidebar({
    current: () => conversation,
    opened: open,
    deleted: async (id) => {
      await stopFor(id);
      if (id === conversation.id) await open(newConversation());
    },
  });
  setUpShortcuts({ k: sidebar.find, b: sidebar.toggle, "shift+o": begin });
  models = setUpModels(showModel);
  const question = linkedQuestion();
  await change((!question && (await lastShown())) || newConversation());
  composer.restore(question);
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
  composer.takes(model.architecture.input_modalities);
  const most = model.max_model_len; // null: a model that is not loaded, and whose file was not read yet
  const context = most ? `, ${number.format(most)} tokens of context` : "";
  byId("welcome-model").replaceChildren(el("strong", {}, model.id), context);
  showContext(path(conversation), most);
}

await start();
