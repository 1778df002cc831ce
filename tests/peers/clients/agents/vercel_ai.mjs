// Vercel's AI SDK: text whole and streamed, an object of a schema, a forced call, Anthropic's API. Prints what came.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , url, name, packages] = process.argv;
const { resolve } = createRequire(`${packages}/package.json`);
const load = async (module) => import(pathToFileURL(resolve(module)).href);
const { generateText, streamText, generateObject, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { z } = await load("zod");

const provider = createOpenAICompatible({ name: "evener", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const model = provider(name);
const prompt = "What is the weather in Paris?";
const city = z.object({ city: z.enum(["Paris", "Rome"]), sunny: z.boolean() }).strict();
const few = { model, prompt, maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
const more = { ...few, maxOutputTokens: 2000, temperature: 1 };

const whole = (await generateText(few)).text;
let streamed = "";
for await (const part of streamText(few).textStream) streamed += part;
const { object } = await generateObject({ ...more, schema: city });
const tools = { weather: tool({ description: "The weather.", inputSchema: city, execute: async () => "warm" }) };
const called = await generateText({ ...more, tools, toolChoice: "required" });
const parts = [];
for await (const part of streamText({ ...more, tools, toolChoice: "required" }).fullStream) parts.push(part.type);
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(name);
const message = (await generateText({ ...few, model: anthropic })).text;
const use = await generateText({ ...more, model: anthropic, tools, toolChoice: "required" });
console.log(
  JSON.stringify({
    whole,
    streamed,
    object,
    called: called.toolCalls.map(({ toolName, input }) => [toolName, input]),
    results: called.toolResults.map(({ output }) => output),
    parts: [...new Set(parts)],
    message,
    used: use.toolCalls.map(({ toolName, input }) => [toolName, input]),
  }),
);
