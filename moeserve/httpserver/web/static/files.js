// Files that go with a message: text and PDF, read here and sent as part of the question.

import { byId, el, number } from "./dom.js";
import { isPdf, MAX_PDF_BYTES, readPdf } from "./pdf_files.js";

const MAX_BYTES = 1_000_000; // of a file of text

/** The files that are waiting to be sent. `problem(text)` is told why one cannot be. */
export function setUpFiles(problem) {
  let waiting = [];
  const list = byId("files");
  const chooser = byId("chooser");
  byId("attach").onclick = () => chooser.click();
  chooser.onchange = async () => {
    await attach(chooser.files);
    chooser.value = ""; // so that the same file can be chosen again
  };
  document.ondragover = (event) => event.dataTransfer.types.includes("Files") && event.preventDefault();
  document.ondrop = (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    attach(event.dataTransfer.files);
  };
  document.addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attach(event.clipboardData.files);
  });
  return { take };

  async function attach(files) {
    for (const file of [...files]) {
      const { signal, progress, done, drop } = announce(file.name);
      const { text, remark, cause } = await read(file, signal, progress);
      if (signal.aborted) continue;
      if (cause || remark) problem(cause || remark);
      if (cause) drop();
      else done(text);
    }
  }

  /** Shows a file that is being read. */
  function announce(name) {
    const controller = new AbortController();
    const shown = el("span", {}, `${name}, reading …`);
    const file = { name, text: null };
    const drop = () => {
      controller.abort();
      item.remove();
      waiting = waiting.filter((one) => one !== file);
      list.hidden = waiting.length === 0;
    };
    const remove = () => {
      drop();
      byId("words").focus();
    };
    const button = el("button", { type: "button", className: "quiet", ariaLabel: `Remove ${name}`, onclick: remove }, "✕");
    const item = el("li", {}, shown, button);
    const done = (text) => {
      file.text = text;
      shown.textContent = nameAndSize(file);
    };
    waiting.push(file);
    list.append(item);
    list.hidden = false;
    return { signal: controller.signal, progress: (text) => (shown.textContent = `${name}, ${text} …`), done, drop };
  }

  /** Returns the files, {name, text}, which wait no longer; null while one of them is being read. */
  function take() {
    const unread = waiting.find(({ text }) => text === null);
    if (unread) {
      problem(`${unread.name} is still being read.`);
      return null;
    }
    const taken = waiting;
    waiting = [];
    list.replaceChildren();
    list.hidden = true;
    return taken;
  }
}

export function nameAndSize({ name, text }) {
  return `${name}, ${number.format(text.length)} characters`;
}

/** {text, remark}, or {cause}: why the file cannot be sent. */
async function read(file, signal, progress) {
  try {
    const isOfPages = isPdf(file.name, await file.slice(0, 5).text());
    const most = isOfPages ? MAX_PDF_BYTES : MAX_BYTES;
    if (file.size > most) return { cause: `${file.name} is larger than ${number.format(most)} bytes.` };
    const bytes = new Uint8Array(await file.arrayBuffer());
    return isOfPages ? await readPdf(file, bytes, signal, progress) : readText(file, bytes);
  } catch (error) {
    if (!(error instanceof DOMException)) throw error; // a folder, or a file that is gone
    return { cause: `${file.name} could not be read.` };
  }
}

function readText(file, bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return { text };
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
  }
  return { cause: `${file.name} is neither text nor a PDF. Models here read text only: copy the words of a picture.` };
}
