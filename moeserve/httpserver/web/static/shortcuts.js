// Keys that work wherever the cursor is, and the question that a link brings.

const MOST_LINKED = 8000; // characters
const isMac = /^Mac|^iP/.test(navigator.platform);

/** `keys`: {"k": act, "shift+o": act}, each with Ctrl, or Cmd on a Mac. Not while a dialog is open. */
export function setUpShortcuts(keys) {
  document.addEventListener("keydown", (event) => {
    const isHeld = isMac ? event.metaKey && !event.ctrlKey : event.ctrlKey && !event.metaKey;
    if (!isHeld || event.altKey || document.querySelector("dialog[open]")) return;
    const act = keys[(event.shiftKey ? "shift+" : "") + event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

/** The question of an address such as /?q=Why%3F or /#q=Why%3F, which is taken out of it; "" without one. It is for the
 *  user to send: a link is a stranger's. Behind # it does not reach the server's log. */
export function linkedQuestion() {
  const linked = new URLSearchParams(location.search).get("q") ?? new URLSearchParams(location.hash.slice(1)).get("q");
  if (linked === null) return "";
  history.replaceState(null, "", location.pathname);
  return linked.slice(0, MOST_LINKED);
}
