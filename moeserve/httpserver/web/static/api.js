// The server's HTTP API, as the pages need it. Paths are relative, so that a proxy may put the pages anywhere.

const KEY = "moeserve.api-key";
const DATA = "data: ";
const LOADING = ": loading: ";

/** Kept for this tab only, and gone with it. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

/** A request that did not get its answer. `status` is HTTP's, 0 where there was none. */
export class RequestFailed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The response, of which the head alone has come. Throws RequestFailed with the server's own words; an abort goes through as
 *  AbortError. */
async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestFailed(0, "The server cannot be reached. It may have stopped, or the network is down.");
  }
  if (!response.ok) throw new RequestFailed(response.status, await causeOf(response));
  return response;
}

async function causeOf(response) {
  const text = await whole(response);
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 500) || response.statusText; // a proxy's own words, most likely
  }
}

/** The text of a response. Throws RequestFailed where the connection breaks before its end. */
async function whole(response) {
  try {
    return await response.text();
  } catch (error) {
    throw error instanceof TypeError ? cutOff() : error;
  }
}

/** The value of a response. Throws RequestFailed where that is cut off, or no JSON: a proxy may answer in the server's place. */
async function valueOf(response) {
  const text = await whole(response);
  try {
    return JSON.parse(text);
  } catch {
    throw new RequestFailed(response.status, `The answer is not the server's: ${text.slice(0, 200)}`);
  }
}

export async function getJson(path) {
  return valueOf(await request(path));
}

/** Posts JSON; returns the answer's. */
export async function postJson(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return valueOf(await request(path, { method: "POST", headers, body: JSON.stringify(body), signal }));
}

export async function getText(path) {
  return whole(await request(path));
}

/** `[{id, root, parent, max_model_len, …}]`: models, their further names and adapters. With several models each has its
 *  `state`, too. */
export async function servedModels() {
  return (await getJson("v1/models")).data;
}

/** The first of them. */
export async function servedModel() {
  return (await servedModels())[0];
}

/** `{status, stage, fraction, cause}`; needs no key, and its 503 is an answer too. */
export async function health() {
  try {
    return await (await fetch("health", { cache: "no-store" })).json();
  } catch {
    return { status: "gone" };
  }
}

/** The chunks of a streamed answer, as they come, and `{loading: "weights 40%"}` while its model loads. Throws
 *  RequestFailed, also when the stream ends too early. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  try {
    for await (const event of events(response.body)) {
      if (event.startsWith(LOADING)) yield { loading: event.slice(LOADING.length) };
      if (!event.startsWith(DATA)) continue; // a comment that keeps the connection
      const data = event.slice(DATA.length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new RequestFailed(response.status, chunk.error.message);
      yield chunk;
    }
  } catch (error) {
    throw error instanceof TypeError ? cutOff() : error;
  }
  throw cutOff();
}

/** In place of the TypeError by which fetch says that a connection broke. */
function cutOff() {
  return new RequestFailed(0, "The connection ended before the answer did.");
}

/** The server-sent events, of one line each. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {}); // already broken or aborted: nothing is left to cancel
  }
}
