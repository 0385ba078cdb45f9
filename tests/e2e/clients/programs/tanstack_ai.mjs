// TanStack AI, streamed, over OpenAI's chat API and over responses.
import { chat, maxIterations, toolDefinition } from "@tanstack/ai";
import { createOpenaiChat, createOpenaiChatCompletions } from "@tanstack/ai-openai";
import { z } from "zod";

const [url, name, kind] = process.argv.slice(2);
const weather = toolDefinition({
  name: "weather",
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  outputSchema: z.string(),
}).server(async () => "Rain.");
const make = { chat: createOpenaiChatCompletions, responses: createOpenaiChat }[kind];
const parts = chat({
  adapter: make(name, "none", { baseURL: url + "/v1" }),
  messages: [{ role: "user", content: "What is the weather?" }],
  tools: [weather],
  agentLoopStrategy: maxIterations(5),
});
for await (const part of parts) {
  if (part.type === "TEXT_MESSAGE_CONTENT") process.stdout.write(part.delta);
}
