// A kept message as the chat API takes it.

import { fenced } from "./conversation.js";
import { pictureOf } from "./picture_store.js";

export const REFUSED = "The user did not allow this call."; // what the model is told

/** The messages for one that is kept: an answer with calls of tools is followed by their results. */
export async function messagesOf(message) {
  const calls = (message.calls ?? []).filter(({ isWhole }) => isWhole);
  const own = await messageOf(message);
  if (!calls.length) return [own];
  const called = calls.map(({ id, name, arguments: sent }) => ({ id, type: "function", function: { name, arguments: sent } }));
  const results = calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result?.text ?? REFUSED }));
  return [{ ...own, tool_calls: called }, ...results];
}

/** Pictures and videos go before the words, as models are trained. */
async function messageOf({ role, content, reasoning, attachments = [] }) {
  const parts = await Promise.all(attachments.filter(({ picture }) => picture).map(picturePart));
  const text = [...attachments.filter(({ picture }) => !picture).map(fenced), content].filter(Boolean).join("\n\n");
  if (parts.length) return { role, content: text ? [...parts, { type: "text", text }] : parts };
  return reasoning ? { role, content: text, reasoning_content: reasoning } : { role, content: text };
}

async function picturePart({ name, picture }) {
  const url = await pictureOf(picture);
  if (url === null) return { type: "text", text: `(${name}: it is no longer kept.)` };
  return url.startsWith("data:video/") ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } };
}
