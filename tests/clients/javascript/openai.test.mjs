// OpenAI's own library.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI, { AuthenticationError, BadRequestError, NotFoundError } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { collect, key, model, question, url, weather } from "./common.mjs";

const client = (apiKey = key) => new OpenAI({ baseURL: url, apiKey, maxRetries: 0 });
const brief = { model, temperature: 0, max_tokens: 24 };
const messages = [{ role: "user", content: question }];
const tools = [{ type: "function", function: weather }];

test("a chat, whole and as a stream", async () => {
  const whole = await client().chat.completions.create({ ...brief, messages });
  const stream = await client().chat.completions.create({
    ...brief,
    messages,
    stream: true,
    stream_options: { include_usage: true },
  });
  const pieces = await collect(stream, (chunk) => chunk.choices[0]?.delta.content);
  assert.equal(pieces.join(""), whole.choices[0].message.content);
  assert.ok(pieces.length > 3);
});

test("the parsed answer follows a schema of Zod", async () => {
  const city = z.object({ name: z.enum(["Paris", "Rome"]), capital: z.boolean() });
  const asked = { ...brief, messages, response_format: zodResponseFormat(city, "city") };
  const { parsed } = (await client().chat.completions.parse(asked)).choices[0].message;
  assert.deepEqual(Object.keys(parsed), ["name", "capital"]);
});

test("a tool is run", async () => {
  const named = { tool_choice: { type: "function", function: { name: "weather" } } };
  const runnable = { ...weather, parse: JSON.parse, function: ({ city }) => `17 degrees in ${city}` };
  const asked = { ...brief, ...named, messages, max_tokens: 48, tools: [{ type: "function", function: runnable }] };
  const run = client().chat.completions.runTools(asked, { maxChatCompletions: 1 });
  await run.done();
  assert.match(await run.finalFunctionToolCallResult(), /^17 degrees in /);
});

test("a streamed call has its arguments in pieces", async () => {
  const stream = client().chat.completions.stream({ ...brief, messages, tools, tool_choice: "required" });
  const { tool_calls: calls } = await stream.finalMessage();
  assert.equal(typeof JSON.parse(calls[0].function.arguments).city, "string");
});

test("responses: whole, as a stream, continued and deleted", async () => {
  const asked = { model, input: question, temperature: 0, max_output_tokens: 24 };
  const whole = await client().responses.create({ ...asked, store: true });
  const stream = await client().responses.create({ ...asked, stream: true });
  const pieces = await collect(stream, (event) =>
    event.type === "response.output_text.delta" ? event.delta : "",
  );
  assert.equal(pieces.join(""), whole.output_text);
  const next = await client().responses.create({ ...asked, input: "And of Italy?", previous_response_id: whole.id });
  assert.ok(next.output_text);
  await client().responses.delete(whole.id);
  await assert.rejects(client().responses.retrieve(whole.id), NotFoundError);
});

test("embeddings and models", async () => {
  const { data } = await client().embeddings.create({ model: "pirate", input: ["one", "two"] });
  assert.equal(data[0].embedding.length, data[1].embedding.length);
  assert.ok((await collect(client().models.list(), (each) => each.id)).includes(model));
});

test("a stream that is left and errors of the library's own classes", async () => {
  const stream = await client().chat.completions.create({ ...brief, messages, stream: true });
  for await (const _ of stream) break;
  await assert.rejects(client("wrong").chat.completions.create({ ...brief, messages }), AuthenticationError);
  await assert.rejects(client().chat.completions.create({ ...brief, messages, model: "unknown" }), NotFoundError);
  await assert.rejects(client().chat.completions.create({ ...brief, messages, temperature: 3 }), BadRequestError);
});
