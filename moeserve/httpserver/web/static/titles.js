// A title that the model writes, where the settings ask for one. The question stands behind the first answer, so that the server has
// all before it in its prefix cache.

import { postJson, RequestFailed } from "./api.js";
import { MAX_TITLE } from "./conversation.js";

const QUESTION = "Write a title for this conversation, in its language and of six words at most. Answer with the title alone.";
// A model that cannot leave its reasoning out gets so far with it.
const LIMITS = { max_tokens: 256, thinking_token_budget: 128, temperature: 0 };

/** `body`: the model, its tools, and the conversation's messages as a request has them. Returns "" where no title came. */
export async function titleByModel({ messages, ...body }) {
  const asked = { ...body, ...LIMITS, messages: [...messages, { role: "user", content: QUESTION }] };
  if (body.tools) asked.tool_choice = "none";
  asked.chat_template_kwargs = { enable_thinking: false };
  try {
    const { choices } = await postJson("v1/chat/completions", asked);
    return titleIn(choices[0].message.content ?? "");
  } catch (error) {
    if (!(error instanceof RequestFailed)) throw error;
    return ""; // the first words serve as well
  }
}

/** The first line without the marks that models put around a title. */
function titleIn(text) {
  const [line] = text.trim().split("\n");
  const bare = (words) => words.replace(/^["'“”«»*_`#\s]+|["'“”«»*_`.\s]+$/g, "");
  return bare(bare(line).replace(/^title\s*:/i, "")).slice(0, MAX_TITLE).trim();
}
