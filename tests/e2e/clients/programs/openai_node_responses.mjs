// OpenAI's Node client: responses, parsed and streamed, the output appended as it came.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", name: "weather", parameters, strict: true }];
const input = [{ role: "user", content: "What is the weather?" }];
let response;
for (let turn = 0; turn < 3; turn++) {
  response =
    turn === 1
      ? await client.responses.stream({ model, input, tools }).finalResponse()
      : await client.responses.parse({ model, input, tools });
  input.push(...response.output);
  for (const item of response.output) {
    if (item.type === "function_call") {
      input.push({ type: "function_call_output", call_id: item.call_id, output: "Rain." });
    }
  }
}
console.log(response.output_text);
