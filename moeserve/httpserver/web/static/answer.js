// One answer while it comes, and what is known of it afterwards.

/** Runs a request and keeps `message` up to date, calling `changed` after every piece. Ends when the answer has: done,
 *  stopped (through `signal`) or failed, as `message.state` says. Times are in milliseconds. */
export async function receive(chunks, message, signal, changed) {
  const sent = performance.now();
  let first = null; // when the first token came
  try {
    for await (const chunk of chunks) {
      if (chunk.loading) {
        message.progress = { loading: chunk.loading };
        message.state = "reading";
        changed();
        continue;
      }
      if (chunk.prompt_progress) {
        message.progress = chunk.prompt_progress;
        message.state = "reading";
      }
      const delta = chunk.choices[0]?.delta ?? {};
      if (delta.reasoning_content || delta.content || delta.tool_calls) {
        first ??= performance.now();
        take(message, delta);
      }
      if (chunk.choices[0]?.finish_reason) message.finish = chunk.choices[0].finish_reason;
      message.stats = figures(chunk, message.stats, sent, first);
      changed();
    }
    message.state = "done";
    for (const call of message.calls ?? []) call.isWhole = true;
  } catch (error) {
    message.state = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) message.error = { status: error.status ?? 0, text: error.message };
  }
  delete message.progress;
  changed();
}

function take(message, delta) {
  if (delta.reasoning_content) {
    message.state = "thinking";
    message.reasoning += delta.reasoning_content;
  }
  if (delta.content) {
    message.state = "answering";
    message.content += delta.content;
  }
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    message.state = "answering";
    message.calls ??= [];
    const call = (message.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name ||= called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
}

/** The figures so far: the server's own once it has sent them, those of this clock before. */
function figures(chunk, before, sent, first) {
  const now = performance.now();
  const stats = { ...before, total_ms: now - sent };
  if (first !== null) stats.first_token_ms = first - sent;
  if (chunk.usage) {
    stats.tokens = chunk.usage.completion_tokens;
    stats.prompt_tokens = chunk.usage.prompt_tokens;
    stats.thought_tokens = chunk.usage.completion_tokens_details.reasoning_tokens;
    if (first !== null && stats.tokens > 1) stats.rate = ((stats.tokens - 1) / (now - first)) * 1000;
  }
  if (chunk.timings) {
    stats.rate = chunk.timings.decode_tokens_per_second;
    stats.prompt_rate = chunk.timings.prefill_tokens_per_second;
    stats.cached_tokens = chunk.timings.cached_tokens;
  }
  return stats;
}
