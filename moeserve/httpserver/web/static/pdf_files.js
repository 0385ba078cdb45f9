// The text of PDF files. pdf.js and its worker (pdf_worker.js) are loaded when the first file comes.

import { number } from "./dom.js";

export const MAX_PDF_BYTES = 20_000_000;
const MAX_PAGES = 500;
const MAX_CHARACTERS = 1_000_000; // as a text file may have
const PATIENCE_MS = 60_000; // for each page

const PROBLEMS = {
  encrypted: "needs a password. Save it without one, or copy its words.",
  damaged: "is damaged, or no PDF.",
  pictures: "has no text: its pages are pictures, such as scans. Text recognition (OCR) can add the words.",
  unread: "has no text that can be read here: its fonts need tables of characters. Copy its words.",
  pages: `has more than ${number.format(MAX_PAGES)} pages.`,
  characters: `has more than ${number.format(MAX_CHARACTERS)} characters of text.`,
  slow: `took more than ${PATIENCE_MS / 1000} s for a page.`,
  failed: "could not be read: what reads PDF files did not start, or ended.",
};

// A page that lets no text become a script's address (trusted types) has this one exception: the worker's address.
const WORKER = new URL("./pdf_worker.js", import.meta.url).href;
const addresses = globalThis.trustedTypes?.createPolicy("pdf-worker", { createScriptURL: () => WORKER });

/** By its name or its first five characters. */
export function isPdf(name, head) {
  return name.toLowerCase().endsWith(".pdf") || head === "%PDF-";
}

/** {text, remark}, or {cause}: why it cannot be sent. {} once `signal` is aborted. `progress(text)` says how far it is. */
export function readPdf(file, bytes, signal, progress) {
  const worker = new Worker(addresses?.createScriptURL("") ?? WORKER, { type: "module" });
  return new Promise((resolve) => {
    let timer = 0;
    const finish = (found) => {
      clearTimeout(timer);
      worker.terminate();
      resolve(found);
    };
    const fail = (problem) => finish({ cause: `${file.name} ${PROBLEMS[problem]}` });
    const wait = () => {
      clearTimeout(timer);
      timer = setTimeout(() => fail("slow"), PATIENCE_MS);
    };
    signal.addEventListener("abort", () => finish({}));
    worker.onerror = () => fail("failed");
    worker.onmessage = ({ data }) => {
      if (data.problem) fail(data.problem);
      else if (data.text) finish({ text: data.text, remark: remark(file, data) });
      else if (data.pages) {
        progress(`page ${number.format(data.page)} of ${number.format(data.pages)}`);
        wait();
      }
    };
    wait();
    worker.postMessage({ bytes, maxPages: MAX_PAGES, maxCharacters: MAX_CHARACTERS }, [bytes.buffer]);
  });
}

/** What is missing in a text, or "". */
function remark({ name }, { pictures, unread }) {
  const shown = `${pictures.slice(0, 10).join(", ")}${pictures.length > 10 ? ", …" : ""}`;
  const words = pictures.length ? `${name}: no text on page ${shown} (pictures, or empty). ` : "";
  return words + (unread ? `${name}: some of its fonts need tables of characters; their words are missing.` : "");
}
