// Files that go with a message: text and PDF, read here and sent as part of the question, pictures and videos.

import { byId, el, number } from "./dom.js";
import { notice } from "./notice.js";
import { isPicture, isVideo, readPicture, readVideo } from "./picture_files.js";
import { addPicture } from "./picture_store.js";
import { isPdf, MAX_PDF_BYTES, readPdf } from "./pdf_files.js";

const MAX_BYTES = 1_000_000; // of a file of text
const LONG_PASTE = 5000; // characters; more of them become a file, which leaves the field readable

/** The files that are waiting to be sent. `problem(text)` is told why one cannot be. `takes(kinds)` says what the model
 *  reads: ["text", "image", "video"]; before that, only text is taken. */
export function setUpFiles(problem) {
  let waiting = [];
  let kinds = [];
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
    const { files, types } = event.clipboardData;
    const isText = types.includes("text/plain") && types.includes("text/html"); // of Office: cells, and a picture of them
    const text = event.clipboardData.getData("text/plain");
    if (files.length && !isText) {
      event.preventDefault();
      attach(files);
    } else if (event.target === byId("words") && text.length > LONG_PASTE && text.length <= MAX_BYTES) {
      event.preventDefault();
      attachPasted(text);
    }
  });
  return { take, takes };

  function takes(of) {
    kinds = of;
    const seen = [kinds.includes("image") && "pictures, ", kinds.includes("video") && "videos, "].filter(Boolean).join("");
    byId("attach").ariaLabel = `Attach ${seen}text or PDF files`;
  }

  async function attach(files) {
    for (const file of [...files]) {
      const { signal, progress, done, drop } = announce(file.name);
      const { text, picture, remark, cause } = await read(file, kinds, signal, progress);
      if (signal.aborted) continue;
      if (cause || remark) problem(cause || remark);
      if (cause) drop();
      else done({ text, ...picture });
    }
  }

  function attachPasted(text) {
    const count = waiting.filter(({ name }) => name.startsWith("pasted")).length;
    const { done, drop } = announce(count ? `pasted ${count + 1}.txt` : "pasted.txt");
    done({ text });
    notice("The pasted text goes with your message as a file.", "Insert it instead", () => {
      const words = byId("words");
      drop();
      words.setRangeText(text, words.selectionStart, words.selectionEnd, "end");
      words.dispatchEvent(new Event("input"));
      words.focus();
    });
  }

  /** Shows a file that is being read. */
  function announce(name) {
    const controller = new AbortController();
    const shown = el("span", {}, `${name}, reading …`);
    const file = { name, isRead: false };
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
    const done = (content) => {
      Object.assign(file, content, { isRead: true });
      shown.textContent = nameAndSize(file);
      if (file.width) item.prepend(el("img", { src: file.url, alt: "" }));
    };
    waiting.push(file);
    list.append(item);
    list.hidden = false;
    return { signal: controller.signal, progress: (text) => (shown.textContent = `${name}, ${text} …`), done, drop };
  }

  /** Returns the files, which wait no longer, {name, text}, {name, picture, width, height} or, of a video, {name,
   *  picture, size}; null while one of them is being read. */
  function take() {
    const unread = waiting.find(({ isRead }) => !isRead);
    if (unread) {
      problem(`${unread.name} is still being read.`);
      return null;
    }
    const taken = waiting.map(({ name, text, url, width, height, size }) => {
      if (!url) return { name, text };
      return { name, picture: addPicture(url), ...(size === undefined ? { width, height } : { size }) };
    });
    waiting = [];
    list.replaceChildren();
    list.hidden = true;
    return taken;
  }
}

export function nameAndSize({ name, text, width, height, size }) {
  if (size !== undefined) return `${name}, ${number.format(size)} bytes`;
  return text === undefined ? `${name}, ${width} × ${height}` : `${name}, ${number.format(text.length)} characters`;
}

/** {text, remark} or {picture}, or {cause}: why the file cannot be sent. */
async function read(file, kinds, signal, progress) {
  try {
    if (isPicture(file)) {
      if (kinds.includes("image")) return await readPicture(file);
      return { cause: `${file.name} is a picture, and this model reads text only. Copy the words of the picture.` };
    }
    if (isVideo(file)) {
      if (kinds.includes("video")) return await readVideo(file);
      return { cause: `${file.name} is a video, and this model sees none.` };
    }
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

/** UTF-8; UTF-16 with its mark, as PowerShell and Notepad write it; else Windows' one-byte letters, as Excel writes CSV. */
function readText(file, bytes) {
  const mark = bytes[0] << 8 | bytes[1];
  const encoding = { 0xfffe: "utf-16le", 0xfeff: "utf-16be" }[bytes.length > 1 ? mark : 0] ?? "utf-8";
  const text = decoded(bytes, encoding);
  if (text !== undefined) return { text };
  const guess = encoding === "utf-8" ? decoded(bytes, "windows-1252") : undefined;
  if (guess === undefined) return { cause: `${file.name} is neither text nor a PDF nor a picture.` };
  return { text: guess, remark: `${file.name} is not UTF-8 and was read as Windows-1252. If letters are wrong, save it as UTF-8.` };
}

/** The text; undefined if the bytes are none in this encoding, or have control characters, as other files do. */
function decoded(bytes, encoding) {
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    const controls = encoding === "windows-1252" ? /[\0-\x08\x0e-\x1f\x7f-\x9f]/ : /\0/;
    return controls.test(text) ? undefined : text;
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    return undefined;
  }
}
