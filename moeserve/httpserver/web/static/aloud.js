// Answers read aloud by the browser's own voices: by one on the device where there is one, else by whichever it has.

import { el } from "./dom.js";
import { notice } from "./notice.js";

const WARNED = "moeserve.aloud-warned";
const LABEL = "Read aloud";
let reading = null; // the button of the answer that is read

/** A button that reads what `container()` shows, and stops that; null where the browser cannot speak. */
export function aloudButton(container) {
  const speech = globalThis.speechSynthesis;
  if (!speech) return null;
  const button = el("button", { type: "button", className: "quiet", ariaPressed: "false", onclick: toggle }, LABEL);
  return button;

  function toggle() {
    const isReading = reading === button;
    stop();
    if (!isReading) start();
  }

  function start() {
    const voices = speech.getVoices();
    if (!voices.length) return notice("This browser has no voice to read with.");
    const voice = localVoice(voices);
    if (!voice) warnOnce();
    const parts = spokenParts(container()).map((text) => new SpeechSynthesisUtterance(text));
    if (!parts.length) return;
    setReading(button);
    for (const part of parts) {
      if (voice) part.voice = voice;
      part.onerror = ({ error }) => end(["canceled", "interrupted"].includes(error) ? "" : `The voice failed: ${error}.`);
      speech.speak(part);
    }
    parts.at(-1).onend = () => end("");
  }

  function end(problem) {
    if (reading !== button) return; // stopped, or another answer is read now
    stop();
    if (problem) notice(problem);
  }

  function stop() {
    setReading(null);
    speech.cancel();
  }
}

function setReading(button) {
  reading?.setAttribute("aria-pressed", "false");
  reading = button;
  reading?.setAttribute("aria-pressed", "true");
}

/** One on the device for the browser's language, else any there; undefined where all are elsewhere. */
function localVoice(voices) {
  const local = voices.filter(({ localService }) => localService);
  const [language] = navigator.language.split("-");
  return local.find(({ lang }) => lang.split(/[-_]/)[0] === language) ?? local[0];
}

/** The text of each block, since browsers break off a long one. Code is named, not read. */
function spokenParts(container) {
  const whole = container.cloneNode(true);
  for (const code of whole.querySelectorAll("figure.code")) code.replaceWith(el("p", {}, "(Code.)"));
  for (const twice of whole.querySelectorAll(".katex-html, annotation")) twice.remove();
  return Array.from(whole.children, (block) => block.textContent.trim()).filter(Boolean);
}

function warnOnce() {
  if (localStorage.getItem(WARNED)) return;
  localStorage.setItem(WARNED, "yes");
  notice("Your browser may send the answer to its maker, to have it read there: no voice is on this device.");
}
