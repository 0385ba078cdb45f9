// OpenAI's Agents SDK for Node, streamed, over the chat API and over responses.
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

const [url, name, kind] = process.argv.slice(2);
setTracingDisabled(true);
const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const Model = { chat: OpenAIChatCompletionsModel, responses: OpenAIResponsesModel }[kind];
const weather = tool({
  name: "weather",
  description: "The weather of a city.",
  parameters: z.object({ city: z.string() }),
  execute: async () => "Rain.",
});
const agent = new Agent({ name: "a", tools: [weather], model: new Model(client, name) });
const result = await run(agent, "What is the weather?", { stream: true });
for await (const _ of result);
console.log(result.finalOutput);
