// A file of conversations, as "Export all" writes it, is read with the caution that a stranger's file needs: nothing that
// is not of the known form is taken over, and whatever is not is an error with its place.

const MAX_CONVERSATIONS = 10_000;
const MAX_MESSAGES = 20_000; // of a conversation
const MAX_ATTACHMENTS = 100; // of a message
const MAX_CALLS = 1000; // of a message
const MAX_TEXT = 20_000_000; // characters of a message
const MAX_PICTURE = 20_000_000; // characters of a data URL
const ID = /^[0-9a-f]{1,64}$/;
const PICTURE = /^data:(image\/(png|jpeg|webp|gif)|video\/[\w.+-]+);base64,[A-Za-z0-9+/]+=*$/;
const ROLES = ["user", "assistant"];
const FINISHED = ["done", "stopped", "failed"];

export const MAX_FILE_BYTES = 200_000_000;

/** Why a file cannot be taken over. */
export class NotImported extends Error {}

/** [{conversation, pictures}] of the file's text; pictures: URLs by id. Throws NotImported, before anything is kept. */
export function readExport(text) {
  let parsed;
  try {
    parsed = JSON.parse(text);
  } catch (error) {
    throw new NotImported(`it is not JSON: ${error.message}`);
  }
  return list(parsed, MAX_CONVERSATIONS, "the file").map((one, i) => readConversation(one, `conversation ${i + 1}`));
}

function readConversation(given, place) {
  requireObject(given, place);
  const messages = list(given.messages, MAX_MESSAGES, `messages of ${place}`).map((one, i) =>
    readMessage(one, `message ${i + 1} of ${place}`),
  );
  requireTree(messages, place);
  const conversation = {
    id: id(given.id, `id of ${place}`),
    title: text(given.title ?? "", 200, `title of ${place}`),
    updated: finite(given.updated, `time of ${place}`),
    ...(given.pinned === true && { pinned: true }),
    messages,
    chosen: Object.fromEntries(Object.entries(requireObject(given.chosen ?? {}, place)).map(([parent, child]) =>
      [parent === "" ? "" : id(parent, place), id(child, place)])),
  };
  const pictures = Object.entries(requireObject(given.pictures ?? {}, place)).map(([key, url]) => {
    if (text(url, MAX_PICTURE, `a picture of ${place}`) && PICTURE.test(url)) return [id(key, place), url];
    throw new NotImported(`a picture of ${place} is no PNG, JPEG, WebP, GIF or video`);
  });
  return { conversation, pictures: new Map(pictures) };
}

function readMessage(given, place) {
  requireObject(given, place);
  if (!ROLES.includes(given.role)) throw new NotImported(`${place} has no role that there is`);
  const read = {
    id: id(given.id, place),
    parent: given.parent === "" ? "" : id(given.parent, place),
    at: finite(given.at, place),
    role: given.role,
    content: text(given.content, MAX_TEXT, place),
  };
  if (given.attachments !== undefined) {
    read.attachments = list(given.attachments, MAX_ATTACHMENTS, place).map((one) => readAttachment(one, place));
  }
  if (given.role === "user") return read;
  if (given.calls !== undefined) read.calls = list(given.calls, MAX_CALLS, place).map((one) => readCall(one, place));
  read.reasoning = text(given.reasoning ?? "", MAX_TEXT, place);
  read.state = FINISHED.includes(given.state) ? given.state : "stopped"; // it was exported while it came
  if (typeof given.finish === "string") read.finish = text(given.finish, 100, place);
  if (typeof given.model === "string") read.model = text(given.model, 1000, place);
  if (given.stats !== undefined) read.stats = numbers(requireObject(given.stats, place), place);
  if (given.error !== undefined) {
    const { status, text: words } = requireObject(given.error, place);
    read.error = { status: finite(status, place), text: text(words, 10_000, place) };
  }
  return read;
}

/** A call without a result can still be allowed, as any that has come from a model. */
function readCall(given, place) {
  requireObject(given, place);
  const read = {
    id: text(given.id, 1000, place),
    name: text(given.name, 1000, place),
    arguments: text(given.arguments, MAX_TEXT, place),
    isWhole: given.isWhole === true,
  };
  if (typeof given.server === "string") read.server = text(given.server, 1000, place);
  if (given.result !== undefined) {
    const { text: words, isError, isRefused } = requireObject(given.result, place);
    read.result = { text: text(words, MAX_TEXT, place), isError: isError === true, isRefused: isRefused === true };
  }
  return read;
}

function readAttachment(given, place) {
  requireObject(given, place);
  const name = text(given.name, 1000, place);
  if (given.picture === undefined) return { name, text: text(given.text, MAX_TEXT, place) };
  if (given.size !== undefined) return { name, picture: id(given.picture, place), size: finite(given.size, place) };
  return { name, picture: id(given.picture, place), width: finite(given.width, place), height: finite(given.height, place) };
}

/** Every message has an id of its own and stands behind its parent: there is a way to each, and none goes in a circle. */
function requireTree(messages, place) {
  const known = new Set([""]);
  for (const message of messages) {
    if (known.has(message.id)) throw new NotImported(`${place} has two messages with the same id`);
    if (!known.has(message.parent)) throw new NotImported(`${place} has a message without the one that it answers`);
    known.add(message.id);
  }
}

function requireObject(value, place) {
  if (typeof value === "object" && value !== null && !Array.isArray(value)) return value;
  throw new NotImported(`${place} is not of the form that “Export all” writes`);
}

function list(value, most, place) {
  if (!Array.isArray(value)) throw new NotImported(`${place}: a list is expected, as “Export all” writes it`);
  if (value.length > most) throw new NotImported(`${place}: ${value.length} entries, of which there may be ${most}`);
  return value;
}

function id(value, place) {
  if (typeof value === "string" && ID.test(value)) return value;
  throw new NotImported(`${place} has an id that this page does not give`);
}

function text(value, most, place) {
  if (typeof value === "string" && value.length <= most) return value;
  throw new NotImported(`${place}: a text of at most ${most} characters is expected`);
}

function finite(value, place) {
  if (Number.isFinite(value)) return value;
  throw new NotImported(`${place}: a number is expected`);
}

function numbers(given, place) {
  return Object.fromEntries(Object.entries(given).slice(0, 20).map(([name, value]) => [name, finite(value, place)]));
}
