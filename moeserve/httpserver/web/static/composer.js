// Where a message is written: the keys, the files that go with it, the button that sends it. One that is sent while an answer
// comes stays in the field, and goes when the answer is complete.

import { byId } from "./dom.js";
import { draftOf, keepDraft } from "./drafts.js";
import { setUpFiles } from "./files.js";
import { notice } from "./notice.js";
import { setUpSpeech } from "./speech.js";

const TOUCH = matchMedia("(pointer: coarse)"); // no Shift to hold: Enter breaks the line, the button sends
const NARROW = matchMedia("(max-width: 40rem)"); // as in chat.css: no room to say which keys do what

/** `send(text, attachments)` is called with a message unless `isBusy()`; `draftId()` says whose draft is written. Returns
 *  {takes}: see `setUpFiles`; {showDraft}: what was written before for the conversation that is shown now;
 *  {ended}: its answer has ended, and a message that waits for that is sent, or with `false` left in the field;
 *  {restore}: at the start, a link's question or that draft, unless the user has begun to write. */
export function setUpComposer({ send, isBusy, draftId }) {
  const form = byId("composer");
  const words = byId("words");
  const files = setUpFiles(notice);
  const held = byId("held");
  setUpSpeech();
  form.onsubmit = (event) => {
    event.preventDefault();
    if (isBusy()) {
      hold(words.value.trim() !== "");
      return;
    }
    const text = words.value.trim();
    const attachments = files.take();
    if (attachments === null || (!text && !attachments.length)) return;
    words.value = "";
    keepDraft(draftId(), "");
    send(text, attachments);
  };
  const hold = (isHeld) => (held.hidden = !isHeld);
  byId("release").onclick = () => {
    hold(false);
    words.focus();
  };
  words.oninput = () => {
    keepDraft(draftId(), words.value);
    if (!words.value.trim()) hold(false);
  };
  words.onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || TOUCH.matches) return;
    event.preventDefault();
    form.requestSubmit();
  };
  words.placeholder = TOUCH.matches || NARROW.matches ? "Ask something" : "Ask something. Enter sends, Shift+Enter breaks the line";
  const showDraft = () => {
    hold(false);
    words.value = draftOf(draftId());
  };
  const ended = (isComplete) => {
    const isHeld = !held.hidden;
    hold(false);
    if (isHeld && isComplete) form.requestSubmit();
  };
  const restore = (linked) => {
    if (linked) words.value = linked;
    else if (!words.value) showDraft();
  };
  return { takes: files.takes, showDraft, restore, ended };
}
