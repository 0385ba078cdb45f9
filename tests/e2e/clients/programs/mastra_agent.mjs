// Mastra's agents, streamed.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const weather = createTool({
  id: "weather",
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => "Rain.",
});
const model = createOpenAICompatible({ baseURL: url + "/v1", name: "local" })(name);
const agent = new Agent({ id: "a", name: "a", instructions: "Help.", model, tools: { weather } });
const stream = await agent.stream("What is the weather?");
for await (const text of stream.textStream) process.stdout.write(text);
