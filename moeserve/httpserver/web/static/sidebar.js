// The list of conversations: search, open, rename, export and import, delete, and take a deletion back.

import { growing, isBusy } from "./answering.js";
import { excerptOf, matches, titleOf } from "./conversation.js";
import { byId, el } from "./dom.js";
import { exportAll, exportAsMarkdown, importFile } from "./exchange.js";
import { notice } from "./notice.js";
import { forgetPictures, picturesOf, putPictures } from "./picture_store.js";
import { conversationOf, conversations, forget, keep } from "./store.js";

const HIDDEN = "moeserve.list-hidden";
const WIDE = matchMedia("(min-width: 64rem)"); // as in chat.css: the list stands beside the conversation

/** `opened(conversation)` and `deleted(id)` are called, and awaited, when the user does that. */
export function setUpSidebar({ current, opened, deleted }) {
  const list = byId("chat-list");
  const search = byId("search");
  const panel = byId("chats");
  const toggle = byId("open-chats");
  search.oninput = refresh;
  byId("export-all").onclick = exportAll;
  const chooser = byId("import-chooser");
  byId("import").onclick = () => chooser.click();
  chooser.onchange = async () => {
    const [file] = chooser.files;
    if (file) await take(file);
    chooser.value = ""; // so that the same file can be chosen again
  };
  byId("close-chats").onclick = () => setShown(false);
  toggle.onclick = showOrHide;
  panel.onkeydown = (event) => {
    if (event.key !== "Escape" || WIDE.matches) return;
    event.stopPropagation();
    setShown(false);
  };
  WIDE.onchange = showAsWide;
  showAsWide();
  return { refresh, find, toggle: showOrHide };

  function showOrHide() {
    const isShown = panel.hidden;
    if (WIDE.matches) localStorage.setItem(HIDDEN, isShown ? "" : "yes");
    setShown(isShown);
    if (isShown) search.focus();
  }

  function find() {
    if (panel.hidden) showOrHide();
    search.select();
  }

  function showAsWide() {
    panel.hidden = !WIDE.matches || Boolean(localStorage.getItem(HIDDEN));
    toggle.ariaExpanded = String(!panel.hidden);
  }

  function setShown(isShown) {
    panel.hidden = !isShown;
    toggle.ariaExpanded = String(isShown);
    if (!isShown) toggle.focus();
  }

  async function refresh() {
    const all = await conversations();
    const found = all.filter((one) => matches(one, search.value.trim()));
    const isPinned = ({ pinned }) => Boolean(pinned);
    list.replaceChildren(...found.filter(isPinned).map(item), ...found.filter((one) => !isPinned(one)).map(item));
    byId("no-chats").hidden = found.length > 0;
    byId("no-chats").textContent = all.length ? "None has these words." : "Conversations are kept here, in this browser.";
    byId("export-all").hidden = all.length === 0;
  }

  function item(conversation) {
    const title = titleOf(conversation);
    const excerpt = excerptOf(conversation, search.value.trim());
    const open = el("button", { type: "button", className: "open", onclick: () => choose(conversation) },
      conversation.pinned ? el("span", { className: "pinned" }, el("span", { className: "off-screen" }, "Pinned: ")) : null, title,
      isBusy(conversation) ? el("span", { className: "answering" }, " …answering") : null,
      excerpt && el("span", { className: "excerpt" }, excerpt.before, el("mark", {}, excerpt.found), excerpt.after));
    if (conversation.id === current().id) open.ariaCurrent = "true";
    const button = (label, onclick) =>
      el("button", { type: "button", className: "quiet", ariaLabel: `${label} “${title}”`, onclick }, label);
    const row = el("li", {}, open);
    const actions = el("div", { className: "actions" },
      button("Rename", () => rename(row, conversation)),
      button(conversation.pinned ? "Unpin" : "Pin", () => set(conversation, { pinned: !conversation.pinned })),
      button("Export", async () => exportAsMarkdown(await conversationOf(conversation.id), title)),
      button("Delete", () => remove(conversation, title)),
    );
    row.append(el("details", { name: "chat-actions" }, el("summary", { ariaLabel: `Actions for “${title}”` }, "⋯"), actions));
    return row;
  }

  /** Changes what is kept, and the same conversation where it is shown or grows: that is kept as it is there. */
  async function set({ id }, fields) {
    const held = id === current().id ? current() : growing(id);
    if (held) Object.assign(held, fields);
    await keep({ ...(await conversationOf(id)), ...fields });
    await refresh();
  }

  async function choose({ id }) {
    if (id !== current().id) await opened(await conversationOf(id)); // the list's own may be out of date
    if (!WIDE.matches) setShown(false);
  }

  function rename(row, conversation) {
    const field = el("input", { value: titleOf(conversation), ariaLabel: "Name of the conversation", maxLength: 200 });
    let isOver = false;
    const end = async (isKept) => {
      if (isOver) return;
      isOver = true;
      if (isKept && field.value.trim()) {
        await set(conversation, { title: field.value.trim() });
      } else {
        await refresh();
      }
    };
    field.onkeydown = (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      end(event.key === "Enter");
    };
    field.onblur = () => end(true);
    row.replaceChildren(field);
    field.select();
  }

  async function remove({ id }, title) {
    await deleted(id); // first: an answer that is coming is kept when it ends
    const last = await conversationOf(id);
    const pictures = await picturesOf(last);
    await forget(id);
    await forgetPictures(pictures.keys());
    await refresh();
    notice(`Deleted “${title}”.`, "Undo", async () => {
      await putPictures(pictures);
      await keep(last);
      await refresh();
    });
  }

  async function take(file) {
    notice(await importFile(file));
    await refresh();
  }
}
