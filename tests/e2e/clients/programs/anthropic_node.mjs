// Anthropic's Node client: its tool runner.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const weather = betaTool({
  name: "weather",
  description: "The weather of a city.",
  inputSchema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  run: () => "Rain.",
});
const messages = [{ role: "user", content: "What is the weather?" }];
const last = await client.beta.messages.toolRunner({ model, max_tokens: 200, tools: [weather], messages });
console.log(last.content.filter((block) => block.type === "text").map((block) => block.text).join(""));
