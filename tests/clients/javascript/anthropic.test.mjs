// Anthropic's own library.
import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { key, model, question, url, weather } from "./common.mjs";

const client = (apiKey = key) => new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey, maxRetries: 0 });
const asked = { model, temperature: 0, max_tokens: 24, messages: [{ role: "user", content: question }] };
const tools = [{ name: weather.name, description: weather.description, input_schema: weather.parameters }];
const image = { type: "image", source: { type: "base64", media_type: "image/png", data: "iVBORw0KGgo=" } };

test("a message, whole and as a stream", async () => {
  const whole = await client().messages.create(asked);
  const pieces = [];
  const stream = client().messages.stream(asked).on("text", (text) => pieces.push(text));
  assert.equal((await stream.finalMessage()).content[0].text, whole.content[0].text);
  assert.equal(pieces.join(""), whole.content[0].text);
  assert.equal((await client().messages.countTokens({ model, messages: asked.messages })).input_tokens > 3, true);
});

test("thinking is left to the model", async () => {
  const answer = await client().messages.create({ ...asked, thinking: { type: "adaptive" } });
  assert.equal(answer.content[0].type, "text");
});

test("a tool is called, and its result may hold an image", async () => {
  const choice = { tools, tool_choice: { type: "tool", name: "weather" } };
  const { content } = await client().messages.create({ ...asked, ...choice });
  const call = content.find((block) => block.type === "tool_use");
  assert.equal(typeof call.input.city, "string");
  const result = { type: "tool_result", tool_use_id: call.id, content: [{ type: "text", text: "17 degrees" }, image] };
  const messages = [...asked.messages, { role: "assistant", content }, { role: "user", content: [result] }];
  assert.ok((await client().messages.create({ ...asked, tools, messages })).content.length);
});

test("errors of the library's own classes", async () => {
  await assert.rejects(client("wrong").messages.create(asked), Anthropic.AuthenticationError);
  await assert.rejects(client().messages.create({ ...asked, model: "unknown" }), Anthropic.NotFoundError);
  const long = { ...asked, messages: [{ role: "user", content: "word ".repeat(20_000) }] };
  await assert.rejects(client().messages.create(long), /prompt is too long: \d+ tokens > \d+ maximum/);
});
