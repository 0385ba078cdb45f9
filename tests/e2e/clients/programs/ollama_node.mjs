// Ollama's Node client: whole and streamed.
import { Ollama } from "ollama";

const [url, model] = process.argv.slice(2);
const client = new Ollama({ host: url });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", description: "Of a city.", parameters } }];
const messages = [{ role: "user", content: "What is the weather?" }];
for (let turn = 0; turn < 3; turn++) {
  let message;
  if (turn === 1) {
    message = { role: "assistant", content: "", thinking: "", tool_calls: [] };
    for await (const { message: part } of await client.chat({ model, messages, tools, stream: true })) {
      message.content += part.content ?? "";
      message.thinking += part.thinking ?? "";
      message.tool_calls.push(...(part.tool_calls ?? []));
    }
  } else ({ message } = await client.chat({ model, messages, tools }));
  messages.push(message);
  for (const call of message.tool_calls ?? []) {
    if (call.function.arguments.city !== "Paris") throw new Error(JSON.stringify(call));
    messages.push({ role: "tool", tool_name: call.function.name, content: "Rain." });
  }
}
console.log(messages.at(-1).content);
