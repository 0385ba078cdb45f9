// Where a message is written: the keys, the files that go with it, the button that sends it.

import { byId } from "./dom.js";
import { setUpFiles } from "./files.js";
import { notice } from "./notice.js";
import { setUpSpeech } from "./speech.js";

const TOUCH = matchMedia("(pointer: coarse)"); // no Shift to hold: Enter breaks the line, the button sends
const NARROW = matchMedia("(max-width: 40rem)"); // as in chat.css: no room to say which keys do what

/** `send(text, attachments)` is called with a message unless `isBusy()`. Returns {takesPictures}: see `setUpFiles`. */
export function setUpComposer({ send, isBusy }) {
  const form = byId("composer");
  const words = byId("words");
  const files = setUpFiles(notice);
  setUpSpeech();
  form.onsubmit = (event) => {
    event.preventDefault();
    if (isBusy()) return;
    const text = words.value.trim();
    const attachments = files.take();
    if (attachments === null || (!text && !attachments.length)) return;
    words.value = "";
    send(text, attachments);
  };
  words.onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || TOUCH.matches) return;
    event.preventDefault();
    form.requestSubmit();
  };
  words.placeholder = TOUCH.matches || NARROW.matches ? "Ask something" : "Ask something. Enter sends, Shift+Enter breaks the line";
  return { takesPictures: files.takesPictures };
}
