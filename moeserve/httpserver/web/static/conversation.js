// A conversation is a tree: a message that was edited and an answer that was asked for again stand beside those they
// replace. `chosen` says which way through the tree is shown.
//
// {id, title, pinned, updated, messages: [{id, parent, at, role, content, …}], chosen: {parent: id}}; the parent of a first
// message is "". Nothing here touches the page.

export const MAX_TITLE = 60; // characters
const EXCERPT_BEFORE = 20; // characters, of a message that a search has found
const EXCERPT_AFTER = 100;

export function newConversation() {
  return { id: newId(), title: "", updated: Date.now(), messages: [], chosen: {} };
}

/** Adds a message after `parent` (null: as a first one), chosen to be shown. */
export function add(conversation, parent, message) {
  const added = { id: newId(), parent: parent?.id ?? "", at: Date.now(), ...message };
  conversation.messages.push(added);
  choose(conversation, added);
  return added;
}

export function choose(conversation, message) {
  conversation.chosen[message.parent] = message.id;
}

/** The messages that are shown, from the first to the last. */
export function path(conversation) {
  const found = [];
  for (let next = chosenAfter(conversation, ""); next; next = chosenAfter(conversation, next.id)) found.push(next);
  return found;
}

function chosenAfter(conversation, parent) {
  const versions = conversation.messages.filter((one) => one.parent === parent);
  return versions.find((one) => one.id === conversation.chosen[parent]) ?? versions.at(-1);
}

/** The versions of a message, itself among them, the oldest first. */
export function versionsOf(conversation, message) {
  return conversation.messages.filter((one) => one.parent === message.parent);
}

export function parentOf(conversation, message) {
  return conversation.messages.find((one) => one.id === message.parent) ?? null;
}

/** Its name, or the beginning of its first question. */
export function titleOf({ title, messages }) {
  if (title) return title;
  const first = messages.find((message) => message.role === "user");
  const words = first?.content || first?.attachments?.[0]?.name || "New conversation";
  const line = words.replace(/\s+/g, " ").trim();
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE).trimEnd()}…` : line;
}

/** Whether every word of the search stands in the title or in a message. */
export function matches(conversation, search) {
  const text = [conversation.title, ...conversation.messages.map((one) => one.content)].join("\n").toLowerCase();
  return search.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

/** Where the first word of a search stands in a message: {before, found, after}; null where the title alone has it. */
export function excerptOf({ messages }, search) {
  const [word] = search.toLowerCase().split(/\s+/);
  const text = word && messages.map(({ content }) => content).find((one) => one.toLowerCase().includes(word));
  if (!text) return null;
  const at = text.toLowerCase().indexOf(word);
  const plain = (part) => part.replace(/\s+/g, " ");
  const start = Math.max(0, at - EXCERPT_BEFORE);
  const end = at + word.length;
  return {
    before: `${start ? "…" : ""}${plain(text.slice(start, at))}`,
    found: text.slice(at, end),
    after: plain(text.slice(end, end + EXCERPT_AFTER)),
  };
}

/** What is shown of it, as a Markdown file. pictures: URLs by id. */
export function asMarkdown(conversation, pictures) {
  const parts = path(conversation).map((message) => {
    const files = (message.attachments ?? []).map((file) => (file.picture ? pictureLink(file, pictures) : fenced(file)));
    return [message.role === "user" ? "## You" : "## The model", ...files, message.content].join("\n\n");
  });
  return `# ${titleOf(conversation)}\n\n${parts.join("\n\n")}\n`;
}

function pictureLink({ name, picture }, pictures) {
  const words = name.replace(/[\\[\]]/g, "\\$&");
  return pictures.get(picture)?.startsWith("data:image/") ? `![${words}](${pictures.get(picture)})` : words;
}

/** A file of text as part of a message: its name, and its text in a fence that is longer than any within. */
export function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** One tab's conversation with what another has kept of it: the messages of both, the longer of each, in this one's
 *  way through them. */
export function merged(ours, theirs) {
  const kept = new Map((theirs?.messages ?? []).map((message) => [message.id, message]));
  const own = ours.messages.map((message) => {
    const other = kept.get(message.id);
    kept.delete(message.id);
    return other && other.content.length > message.content.length ? other : message;
  });
  const messages = [...own, ...kept.values()].sort((a, b) => a.at - b.at);
  return { ...ours, messages, chosen: { ...theirs?.chosen, ...ours.chosen } };
}

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12)); // randomUUID is kept from pages over plain HTTP
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
