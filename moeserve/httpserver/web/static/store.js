// The conversations, kept in this browser (IndexedDB) until they are deleted.

import { merged } from "./conversation.js";
import { hadRoom, openStore } from "./database.js";

const OPEN = "moeserve.open"; // the id of the one that this tab shows

const transact = openStore("moeserve", "conversations");

/** All of them, the latest first. */
export async function conversations() {
  const all = await transact("readonly", (store) => store.getAll());
  return all.sort((a, b) => b.updated - a.updated);
}

/** Keeps a conversation, with what another tab has added to it. Returns whether there was room. */
export async function keep(conversation) {
  return hadRoom(() =>
    transact("readwrite", (store) => {
      const before = store.get(conversation.id);
      before.onsuccess = () => store.put(merged(conversation, before.result));
    }),
  );
}

export async function forget(id) {
  await transact("readwrite", (store) => store.delete(id));
}

/** One of them, or null. */
export async function conversationOf(id) {
  return (await transact("readonly", (store) => store.get(id))) ?? null;
}

/** The conversation that this tab showed before it was loaded again, or null. */
export async function lastOpen() {
  const id = sessionStorage.getItem(OPEN);
  return id === null ? null : conversationOf(id);
}

export function setOpen(id) {
  if (id === null) sessionStorage.removeItem(OPEN);
  else sessionStorage.setItem(OPEN, id);
}
