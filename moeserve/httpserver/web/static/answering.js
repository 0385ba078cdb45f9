// Which conversations wait for something: an answer that comes, or a tool that runs. One at a time in each; the others can be
// shown, read and asked meanwhile.

const running = new Map(); // by the conversation's id: {conversation, controller, end}

/** `start(signal)` returns a promise; until it is settled the conversation is busy. Never rejects by itself. */
export async function whileBusy(conversation, changed, start) {
  const controller = new AbortController();
  const one = { conversation, controller };
  running.set(conversation.id, one);
  one.end = start(controller.signal);
  changed();
  try {
    await one.end;
  } finally {
    running.delete(conversation.id);
    changed();
  }
}

export function isBusy({ id }) {
  return running.has(id);
}

/** The conversation of that id as it grows; undefined where it waits for nothing. */
export function growing(id) {
  return running.get(id)?.conversation;
}

/** Ends what a conversation waits for, and returns when that has been kept. */
export async function stopFor(id) {
  const one = running.get(id);
  one?.controller.abort();
  await one?.end;
}
