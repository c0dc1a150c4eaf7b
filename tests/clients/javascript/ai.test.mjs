// Vercel's AI SDK with its providers for OpenAI (the Responses API), for compatible servers, and for Anthropic.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, NoObjectGeneratedError, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { collect, key, model, question, url } from "./common.mjs";

const makers = {
  openai: (apiKey) => createOpenAI({ baseURL: url, apiKey }),
  compatible: (apiKey) =>
    createOpenAICompatible({ name: "loralane", baseURL: url, apiKey, supportsStructuredOutputs: true }),
  anthropic: (apiKey) => createAnthropic({ baseURL: url, apiKey }),
};
const options = { temperature: 0, maxRetries: 0 };
const brief = { ...options, maxOutputTokens: 12 };
const enough = { ...options, maxOutputTokens: 40 };
const user = (content) => ({ role: "user", content });

for (const [name, make] of Object.entries(makers)) {
  test(`${name}: a conversation, whole and as a stream`, async () => {
    const first = await generateText({ model: make(key)(model), prompt: question, ...brief });
    const stream = streamText({ model: make(key)(model), prompt: question, ...brief });
    assert.equal((await collect(stream.textStream, (text) => text)).join(""), first.text);
    const messages = [user(question), ...first.response.messages, user("And of Italy?")];
    assert.ok((await generateText({ model: make(key)(model), messages, ...brief })).text);
  });

  test(`${name}: a tool is run and its result told`, async () => {
    const weather = tool({
      description: "Get the current weather in a city",
      inputSchema: z.object({ city: z.string().max(12) }),
      execute: async ({ city }) => `17 degrees in ${city}`,
    });
    const { steps } = await generateText({
      model: make(key)(model),
      prompt: "What is the weather in Paris?",
      tools: { weather },
      toolChoice: "required",
      stopWhen: stepCountIs(2),
      ...enough,
    });
    assert.equal(steps.length, 2);
    assert.match(steps[0].toolResults[0].output, /^17 degrees in /);
  });

  test(`${name}: an unknown model and a wrong key`, async () => {
    for (const [apiKey, other, status] of [[key, "unknown", 404], ["wrong", model, 401]]) {
      const asked = generateText({ model: make(apiKey)(other), prompt: question, ...brief });
      await assert.rejects(asked, (error) => APICallError.isInstance(error) && error.statusCode === status);
    }
  });
}

const schemas = {
  "record of an enum": z.object({ tags: z.record(z.enum(["a", "b"]), z.boolean()) }),
  startsWith: z.object({ id: z.string().startsWith("id-").max(6) }),
  base64: z.object({ bytes: z.base64().max(8) }),
  tuple: z.object({ pair: z.tuple([z.string().max(4), z.int().min(0).max(9)]) }),
};

const object = (schema) =>
  generateObject({ model: makers.compatible(key)("json"), schema, prompt: "Make something up", ...enough });

for (const [name, schema] of Object.entries(schemas))
  test(`compatible: an object with ${name}`, async () => {
    const found = (await object(schema)).object;
    assert.deepEqual(schema.parse(found), found);
  });

test("compatible: a record, which may have no end", async () => {
  const made = object(z.object({ tags: z.record(z.string().max(3), z.boolean()) }));
  const text = await made.then(({ object }) => JSON.stringify(object), (error) => {
    assert.ok(NoObjectGeneratedError.isInstance(error) && error.finishReason === "length", error);
    return error.text;
  });
  assert.match(text, /^\{\s*"tags"\s*:\s*\{/);
});
