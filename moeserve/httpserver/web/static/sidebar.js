// The list of conversations: search, open, rename, export and import, delete, and take a deletion back.
// It is brought up to date in place: what the user presses or types in it would be lost with the rows otherwise.

import { growing, isBusy } from "./answering.js";
import { chatRow } from "./chat_row.js";
import { excerptOf, matches, titleOf } from "./conversation.js";
import { byId } from "./dom.js";
import { exportAll, exportAsMarkdown, importFile } from "./exchange.js";
import { notice } from "./notice.js";
import { forgetPictures, picturesOf, putPictures } from "./picture_store.js";
import { conversationOf, conversations, forget, keep } from "./store.js";

const HIDDEN = "moeserve.list-hidden";
const WIDE = matchMedia("(min-width: 64rem)"); // as in chat.css: the list stands beside the conversation

/** `opened(conversation)` and `deleted(id)` are called, and awaited, when the user does that. */
export function setUpSidebar({ current, opened, deleted }) {
  const list = byId("chat-list");
  const rows = new Map(); // by the conversation's id
  const field = byId("search");
  const panel = byId("chats");
  const toggle = byId("open-chats");
  const actions = {
    opened: choose,
    renamed: (conversation, title) => set(conversation, { title }),
    pinned: (conversation) => set(conversation, { pinned: !conversation.pinned }),
    exported: async ({ id }, title) => exportAsMarkdown(await conversationOf(id), title),
    deleted: remove,
  };
  field.oninput = refresh;
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
    if (isShown) field.focus();
  }

  function find() {
    if (panel.hidden) showOrHide();
    field.select();
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
    const search = field.value.trim();
    const found = all.filter((one) => matches(one, search));
    const isPinned = ({ pinned }) => Boolean(pinned);
    const inOrder = [...found.filter(isPinned), ...found.filter((one) => !isPinned(one))];
    setRows(inOrder.map((conversation) => rowFor(conversation, search)));
    for (const id of rows.keys()) if (!all.some((one) => one.id === id)) rows.delete(id);
    byId("no-chats").hidden = found.length > 0;
    byId("no-chats").textContent = all.length ? "None has these words." : "Conversations are kept here, in this browser.";
    byId("export-all").hidden = all.length === 0;
  }

  function rowFor(conversation, search) {
    const { id } = conversation;
    if (!rows.has(id)) rows.set(id, chatRow(actions));
    const row = rows.get(id);
    row.show({
      conversation, title: titleOf(conversation), excerpt: excerptOf(conversation, search), isBusy: isBusy(conversation),
      isCurrent: id === current().id,
    });
    return row.element;
  }

  /** Makes the list of these rows, and moves only those that are not in their place. */
  function setRows(wanted) {
    for (const row of [...list.children]) if (!wanted.includes(row)) row.remove();
    let next = list.firstElementChild;
    for (const row of wanted) {
      if (row === next) next = next.nextElementSibling;
      else list.insertBefore(row, next);
    }
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
