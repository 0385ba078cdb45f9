// How much of the model's context the conversation fills, as the server counted it in its last answer.

import { byId, number, say } from "./dom.js";

const NEARLY_FULL = 0.9;

/** Shows the tokens of the last of `messages` whose tokens are known; nothing before there is one. most: the tokens that
 *  the context has, or null where it is not known yet. */
export function showContext(messages, most) {
  const box = byId("context");
  const used = usedTokens(messages);
  box.hidden = used === null;
  if (used === null) return;
  const share = most ? used / most : 0;
  const meter = byId("context-meter");
  meter.hidden = !most;
  meter.value = Math.min(1, share);
  box.classList.toggle("full", share >= NEARLY_FULL);
  say(byId("context-text"), wordsOf(used, most, share));
}

/** The prompt and the answer, or what has been read of the prompt's tokens while it is read. null: not known. */
function usedTokens(messages) {
  for (const { stats, progress } of messages.toReversed()) {
    if (progress?.total) return progress.total;
    if (stats?.prompt_tokens !== undefined) return stats.prompt_tokens + (stats.tokens ?? 0);
  }
  return null;
}

function wordsOf(used, most, share) {
  if (!most) return `${number.format(used)} tokens`;
  const left = share >= NEARLY_FULL ? ": nearly full, begin a new chat soon" : "";
  return `Context: ${number.format(used)} of ${number.format(most)} tokens${left}`;
}
