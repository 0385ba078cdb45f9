// Strands' agents for Node, over the chat API and over responses.
import { Agent, tool } from "@strands-agents/sdk";
import { OpenAIModel } from "@strands-agents/sdk/models/openai";
import { z } from "zod";

const [url, name, kind] = process.argv.slice(2);
const weather = tool({
  name: "weather",
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  callback: () => "Rain.",
});
const clientConfig = { baseURL: url + "/v1", maxRetries: 0 };
const model = new OpenAIModel({ api: kind, modelId: name, apiKey: "none", clientConfig });
const result = await new Agent({ model, tools: [weather], printer: false }).invoke("What is the weather?");
console.log(result.toString());
