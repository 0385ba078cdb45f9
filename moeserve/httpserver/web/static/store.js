// The conversations, kept in this browser (IndexedDB) until they are deleted.

import { merged } from "./conversation.js";
import { hadRoom, openStore } from "./database.js";

const SHOWN = "moeserve.shown"; // what this tab shows: {id, chosen} of a conversation

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
export async function lastShown() {
  const shown = JSON.parse(sessionStorage.getItem(SHOWN));
  const kept = shown && (await conversationOf(shown.id));
  return kept && { ...kept, chosen: { ...kept.chosen, ...shown.chosen } };
}

/** Remembers at once what this tab shows, or that it shows nothing: where the page is loaded again right after a choice,
 *  the browser gives up what `keep` has not yet written. */
export function setShown(conversation) {
  if (conversation === null) sessionStorage.removeItem(SHOWN);
  else sessionStorage.setItem(SHOWN, JSON.stringify({ id: conversation.id, chosen: conversation.chosen }));
}
