// A row of the list of conversations: open, rename, pin, export, delete. It is made once and changed in place, so that what
// the user presses, types or has opened in it stays while answers come.

import { el } from "./dom.js";

/** `show({conversation, title, excerpt, isBusy, isCurrent})` brings the row up to date. `on` has what the user can do:
 *  opened, renamed(title), pinned, exported and deleted, each called with the conversation as it was shown last. */
export function chatRow(on) {
  let shown = {};
  let field = null; // while the conversation is renamed
  const open = el("button", { type: "button", className: "open", onclick: () => on.opened(shown.conversation) });
  const button = (label, act) => el("button", { type: "button", className: "quiet", onclick: () => closed(act) }, label);
  const buttons = [
    button("Rename", rename),
    button("Pin", () => on.pinned(shown.conversation)),
    button("Export", () => on.exported(shown.conversation, shown.title)),
    button("Delete", () => on.deleted(shown.conversation, shown.title)),
  ];
  const summary = el("summary", {}, "⋯");
  const menu = el("details", { name: "chat-actions" }, summary, el("div", { className: "actions" }, ...buttons));
  const row = el("li", {}, open, menu);
  return { element: row, show };

  function show(next) {
    const words = JSON.stringify([next.title, next.excerpt, next.isBusy, Boolean(next.conversation.pinned)]);
    const isChanged = words !== shown.words;
    shown = { ...next, words };
    open.ariaCurrent = next.isCurrent ? "true" : null;
    if (isChanged) showWords(next);
  }

  function showWords({ conversation: { pinned }, title, excerpt, isBusy }) {
    const parts = [
      pinned ? el("span", { className: "pinned" }, el("span", { className: "off-screen" }, "Pinned: ")) : "",
      title,
      isBusy ? el("span", { className: "answering" }, " …answering") : "",
      excerpt ? el("span", { className: "excerpt" }, excerpt.before, el("mark", {}, excerpt.found), excerpt.after) : "",
    ];
    open.replaceChildren(...parts.filter(Boolean));
    buttons[1].textContent = pinned ? "Unpin" : "Pin";
    for (const one of buttons) one.ariaLabel = `${one.textContent} “${title}”`;
    summary.ariaLabel = `Actions for “${title}”`;
  }

  /** The menu closes with what is chosen in it. */
  function closed(act) {
    menu.open = false;
    summary.focus();
    act();
  }

  function rename() {
    field = el("input", { value: shown.title, ariaLabel: "Name of the conversation", maxLength: 200 });
    field.onkeydown = (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      endRenaming(event.key === "Enter");
    };
    field.onblur = () => endRenaming(true);
    row.replaceChildren(field);
    field.select();
  }

  function endRenaming(isKept) {
    const name = field?.value.trim();
    if (field === null) return; // its removal is a blur, too
    field = null;
    row.replaceChildren(open, menu);
    if (isKept && name) on.renamed(shown.conversation, name);
  }
}
