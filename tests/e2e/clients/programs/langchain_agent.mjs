// LangChain's agents for Node (LangGraph), streamed, over three APIs.
import { ChatAnthropic } from "@langchain/anthropic";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";

const [url, name, kind] = process.argv.slice(2);
const shared = { model: name, apiKey: "none", maxRetries: 0 };
const model =
  kind === "anthropic"
    ? new ChatAnthropic({ ...shared, anthropicApiUrl: url, maxTokens: 100 })
    : new ChatOpenAI({ ...shared, configuration: { baseURL: url + "/v1" }, useResponsesApi: kind === "responses" });
const weather = tool(async () => "Rain.", {
  name: "weather",
  description: "The weather of a city.",
  schema: z.object({ city: z.string() }),
});
const agent = createAgent({ model, tools: [weather] });
const asked = { messages: [{ role: "user", content: "What is the weather?" }] };
let last;
for await (const [mode, state] of await agent.stream(asked, { streamMode: ["messages", "values"] })) {
  if (mode === "values") last = state.messages.at(-1);
}
console.log(last.text);
