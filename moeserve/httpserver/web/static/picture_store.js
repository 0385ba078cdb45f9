// The pictures and videos of the conversations, kept in this browser as data URLs. They are apart from the conversations, which are
// written every other second while an answer comes, and of which the list reads all.

import { newId } from "./conversation.js";
import { hadRoom, openStore } from "./database.js";

const transact = openStore("moeserve.pictures", "pictures");
const unkept = new Map(); // URLs by id: not on the disk yet, or for want of room never

/** The id of a picture, which is on the disk after `keepPictures`. */
export function addPicture(url) {
  const id = newId();
  unkept.set(id, url);
  return id;
}

/** Keeps what was added. Returns whether there was room. */
export async function keepPictures() {
  const added = [...unkept];
  if (!added.length) return true;
  const isKept = await hadRoom(() => putPictures(new Map(added)));
  if (isKept) for (const [id] of added) unkept.delete(id);
  return isKept;
}

/** The data URL of a picture; null: it is gone. */
export async function pictureOf(id) {
  return unkept.get(id) ?? (await transact("readonly", (store) => store.get(id)))?.url ?? null;
}

/** The pictures of a conversation, URLs by id. */
export async function picturesOf({ messages }) {
  const attachments = messages.flatMap((message) => message.attachments ?? []);
  const ids = attachments.flatMap(({ picture }) => picture ?? []);
  const found = await Promise.all(ids.map(async (id) => [id, await pictureOf(id)]));
  return new Map(found.filter(([, url]) => url !== null));
}

/** URLs by id. */
export async function putPictures(pictures) {
  await transact("readwrite", (store) => pictures.forEach((url, id) => store.put({ id, url })));
}

export async function forgetPictures(ids) {
  await transact("readwrite", (store) => [...ids].forEach((id) => store.delete(id)));
}
