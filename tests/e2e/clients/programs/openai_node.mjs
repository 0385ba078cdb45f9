// OpenAI's Node client: runTools, then responses.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const runner = client.chat.completions.runTools({
  model,
  stream: true,
  messages: [{ role: "user", content: "What is the weather?" }],
  tools: [{ type: "function", function: { name: "weather", parameters, function: () => "Rain.", parse: JSON.parse } }],
});
console.log(await runner.finalContent());
