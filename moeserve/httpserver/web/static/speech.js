// Speech instead of typing, where the browser recognises it: on the device where it can, else wherever its maker does.

import { byId } from "./dom.js";
import { notice } from "./notice.js";

const WARNED = "moeserve.speech-warned";
const PROBLEMS = {
  "not-allowed": "The browser does not let this page use the microphone.",
  "service-not-allowed": "The browser does not let this page recognise speech.",
  "audio-capture": "There is no microphone.",
  "no-speech": "Nothing was heard.",
  network: "The browser could not reach the service that recognises speech.",
};

/** The button that starts and ends it; hidden where the browser cannot, as over plain HTTP from another machine. */
export function setUpSpeech() {
  const Recognition = globalThis.SpeechRecognition ?? globalThis.webkitSpeechRecognition;
  const button = byId("speak");
  const words = byId("words");
  if (!Recognition || !isSecureContext) return;
  let running = null;
  button.hidden = false;
  button.onclick = () => (running === null ? start() : running.stop());

  async function start() {
    const recognition = new Recognition();
    running = recognition;
    recognition.lang = navigator.language;
    recognition.continuous = recognition.interimResults = true;
    const isLocal = await canBeLocal(Recognition, recognition.lang);
    if (isLocal) recognition.processLocally = true;
    else warnOnce();
    const before = words.value && !/\s$/.test(words.value) ? `${words.value} ` : words.value;
    recognition.onresult = ({ results }) => {
      words.value = before + Array.from(results, ([best]) => best.transcript).join("");
    };
    recognition.onerror = ({ error }) => {
      if (error !== "aborted") notice(PROBLEMS[error] ?? `Speech was not recognised: ${error}.`);
    };
    recognition.onend = () => setRunning(null);
    setRunning(recognition);
    recognition.start();
  }

  function setRunning(recognition) {
    running = recognition;
    button.ariaPressed = String(recognition !== null);
    if (recognition === null) words.focus();
  }
}

async function canBeLocal(Recognition, language) {
  if (!Recognition.available) return false;
  return (await Recognition.available({ langs: [language], processLocally: true })) === "available";
}

function warnOnce() {
  if (localStorage.getItem(WARNED)) return;
  localStorage.setItem(WARNED, "yes");
  notice("Your browser may send what you say to its maker, to recognise it there. This server hears nothing.");
}
