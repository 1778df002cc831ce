// OpenAI's client for Node.js: a chat, whole and streamed, and an error. Prints what came back, as JSON.
import { createRequire } from "node:module";

const [, , url, packages] = process.argv;
const OpenAI = createRequire(`${packages}/package.json`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });

const model = (await client.models.list()).data[0].id;
const body = {
  model,
  messages: [{ role: "user", content: "Name three colours." }],
  max_completion_tokens: 12,
  temperature: 0,
};
const whole = await client.chat.completions.create(body);
let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({
  ...body,
  stream: true,
  stream_options: { include_usage: true },
})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
let refused = null;
try {
  await client.chat.completions.create({ ...body, model: "no-such-model" });
} catch (error) {
  refused = error.code;
}
console.log(
  JSON.stringify({ whole: whole.choices[0].message.content, streamed, usage: usage.completion_tokens, refused }),
);
