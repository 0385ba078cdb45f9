// Reads the text of one PDF, with pdf.js, in a worker of its own. A stranger's file meets the parser here: where neither
// the page nor the API key is, where the content security policy allows no request (web/pages.py), and where the page
// can end what takes too long.
//
// Takes {bytes, maxPages, maxCharacters}. Posts {page, pages} before each page and at the end {text, pictures, unread}
// (the numbers of pages without text; whether a font's characters could not be told) or {problem}: one of the keys of
// PROBLEMS in pdf_files.js. Messages of pdf.js, which have a `sourceName`, go the same way and mean nothing here.

import { getDocument } from "./vendor/pdf.min.mjs";
import "./vendor/pdf.worker.min.mjs"; // pdf.js finds its parser here, and starts no worker for it

const PROBLEMS = { PasswordException: "encrypted", InvalidPDFException: "damaged" };

class Bound extends Error {}

/** Tables of characters (CMaps) and fonts are no part of this server. Without the latter text can be read. */
class NoTables {
  static asked = false;

  async fetch({ kind, filename }) {
    if (kind === "cMapUrl") NoTables.asked = true;
    throw new Error(`${filename} is not here`);
  }
}

addEventListener("message", async ({ data }) => {
  if (data.bytes) postMessage(await read(data).catch(problemOf));
});

function problemOf(error) {
  return { problem: error instanceof Bound ? error.message : (PROBLEMS[error.name] ?? "damaged") };
}

async function read({ bytes, maxPages, maxCharacters }) {
  const file = await getDocument({
    data: bytes,
    verbosity: 0,
    BinaryDataFactory: NoTables,
    useWorkerFetch: false,
    useWasm: false,
    useSystemFonts: true,
    disableFontFace: true,
    disableWorkerRendering: true,
    isImageDecoderSupported: false,
    isOffscreenCanvasSupported: false,
  }).promise;
  const pages = file.numPages;
  if (pages > maxPages) throw new Bound("pages");
  const texts = [];
  let left = maxCharacters;
  for (let page = 1; page <= pages; page++) {
    postMessage({ page, pages });
    const text = await textOf(await file.getPage(page), left);
    left -= text.length;
    texts.push(text);
  }
  const pictures = texts.flatMap((text, i) => (text ? [] : [i + 1]));
  if (pictures.length === pages) throw new Bound(NoTables.asked ? "unread" : "pictures");
  const parts = texts.map((text, i) => (text ? `[page ${i + 1}]\n${text}` : ""));
  return { text: parts.filter(Boolean).join("\n\n"), pictures, unread: NoTables.asked };
}

/** Throws a Bound when the text has more than `left` characters, before all of it is there. */
async function textOf(page, left) {
  const reader = page.streamTextContent().getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    for (const { str, hasEOL } of value.items) text += hasEOL ? `${str}\n` : str;
    if (text.length > left) throw new Bound("characters");
  }
  page.cleanup();
  return text.replaceAll("\0", "").trim();
}
