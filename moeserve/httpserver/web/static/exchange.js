// Conversations leave the browser as files, and come back from them.

import { asMarkdown } from "./conversation.js";
import { el, number } from "./dom.js";
import { MAX_FILE_BYTES, NotImported, readExport } from "./import_file.js";
import { picturesOf, putPictures } from "./picture_store.js";
import { hadRoom } from "./database.js";
import { conversations, keep } from "./store.js";

export async function exportAsMarkdown(conversation, title) {
  download(`${title}.md`, "text/markdown", asMarkdown(conversation, await picturesOf(conversation)));
}

/** All of them as JSON, with their pictures: what `importFile` reads. */
export async function exportAll() {
  const all = await conversations();
  const whole = all.map(async (one) => ({ ...one, pictures: Object.fromEntries(await picturesOf(one)) }));
  download("conversations.json", "application/json", JSON.stringify(await Promise.all(whole), null, 1));
}

/** Keeps the conversations of a file beside those that are here; one that is here already gets the messages that it lacks.
 *  Returns what to tell the user. Nothing is kept of a file with an error. */
export async function importFile(file) {
  if (file.size > MAX_FILE_BYTES) {
    return `${file.name} was not imported: it is larger than ${number.format(MAX_FILE_BYTES)} bytes.`;
  }
  let found;
  try {
    found = readExport(await file.text());
  } catch (error) {
    if (!(error instanceof NotImported)) throw error;
    return `${file.name} was not imported: ${error.message}.`;
  }
  let kept = 0;
  for (const { conversation, pictures } of found) {
    if (!(await hadRoom(() => putPictures(pictures))) || !(await keep(conversation))) {
      return `This browser has room for ${kept} of the ${found.length} conversations.`;
    }
    kept += 1;
  }
  return `Imported ${kept} ${kept === 1 ? "conversation" : "conversations"}.`;
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name.replace(/[\\/:*?"<>|]/g, " ") }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000); // the browser has begun to save it by then
}
