// What was typed and not sent, for each conversation, as long as this tab is there.

const STORE = "moeserve.drafts";

function stored() {
  return JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
}

export function draftOf(id) {
  const drafts = stored();
  return Object.hasOwn(drafts, id) ? drafts[id] : "";
}

/** Keeps a draft; "" forgets it. Where the browser has no room for it, the text is in the field alone. */
export function keepDraft(id, text) {
  const { [id]: _, ...others } = stored();
  try {
    sessionStorage.setItem(STORE, JSON.stringify(text ? { ...others, [id]: text } : others));
  } catch (error) {
    if (error?.name !== "QuotaExceededError") throw error;
  }
}
