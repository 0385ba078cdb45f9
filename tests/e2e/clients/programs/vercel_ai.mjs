// Vercel's AI SDK over the chat API, over Anthropic's, and over OpenAI's responses, which it refers to by item ids.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, kind] = process.argv.slice(2);
const baseURL = url + "/v1";
const model = {
  anthropic: () => createAnthropic({ baseURL, apiKey: "none" })(name),
  chat: () => createOpenAICompatible({ baseURL, name: "local" })(name),
  responses: () => createOpenAI({ baseURL, apiKey: "none" }).responses(name),
}[kind]();
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => "Rain.",
});
const asked = {
  model,
  tools: { weather },
  maxRetries: 0,
  stopWhen: stepCountIs(5),
  prompt: "What is the weather?",
};
const text = kind === "responses" ? (await generateText(asked)).text : await streamText(asked).text;
console.log(text);
