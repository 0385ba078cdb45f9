// A kept message as the chat API takes it.

import { fenced } from "./conversation.js";
import { pictureOf } from "./picture_store.js";

/** Pictures go before the words, as models are trained. */
export async function messageOf({ role, content, reasoning, attachments = [] }) {
  const parts = await Promise.all(attachments.filter(({ picture }) => picture).map(picturePart));
  const text = [...attachments.filter(({ picture }) => !picture).map(fenced), content].filter(Boolean).join("\n\n");
  if (parts.length) return { role, content: text ? [...parts, { type: "text", text }] : parts };
  return reasoning ? { role, content: text, reasoning_content: reasoning } : { role, content: text };
}

async function picturePart({ name, picture }) {
  const url = await pictureOf(picture);
  if (url === null) return { type: "text", text: `(${name}: the picture is no longer kept.)` };
  return { type: "image_url", image_url: { url } };
}
