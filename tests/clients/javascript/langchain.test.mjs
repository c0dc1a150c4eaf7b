// LangChain's class for OpenAI, over both of its APIs.
import assert from "node:assert/strict";
import { test } from "node:test";
import { ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";
import { collect, key, model, question, url } from "./common.mjs";

const connected = (apiKey = key) => ({ apiKey, configuration: { baseURL: url }, maxRetries: 0 });
const weather = tool(async ({ city }) => `17 degrees in ${city}`, {
  name: "weather",
  description: "Get the current weather in a city",
  schema: z.object({ city: z.string().max(12) }),
});

for (const useResponsesApi of [false, true]) {
  const chat = (options = {}) =>
    new ChatOpenAI({ model, temperature: 0, maxTokens: 32, useResponsesApi, ...connected(), ...options });

  test(`a chat, whole and as a stream (responses: ${useResponsesApi})`, async () => {
    const whole = await chat().invoke(question);
    const pieces = await collect(await chat().stream(question), (chunk) => chunk.text);
    assert.equal(pieces.join(""), whole.text);
  });

  test(`a tool is called and its result told (responses: ${useResponsesApi})`, async () => {
    const answer = await chat().bindTools([weather], { tool_choice: "weather" }).invoke(question);
    const [call] = answer.tool_calls;
    const told = new ToolMessage({ content: await weather.invoke(call.args), tool_call_id: call.id });
    assert.ok((await chat().invoke([["user", question], answer, told])).text);
  });

  test(`a record follows its schema (responses: ${useResponsesApi})`, async () => {
    const schema = z.object({ tags: z.record(z.enum(["a", "b"]), z.boolean()) });
    const found = await chat({ model: "json", maxTokens: 64 })
      .withStructuredOutput(schema, { method: "jsonSchema", strict: false })
      .invoke("Make something up");
    assert.deepEqual(schema.parse(found), found);
  });

  test(`errors say what was wrong (responses: ${useResponsesApi})`, async () => {
    await assert.rejects(chat({ model: "unknown" }).invoke(question), /404.*unknown/s);
    await assert.rejects(chat(connected("wrong")).invoke(question), /401/);
  });
}

test("embeddings", async () => {
  const vectors = await new OpenAIEmbeddings({ model: "pirate", ...connected() }).embedDocuments(["one", "two"]);
  assert.equal(vectors[0].length, vectors[1].length);
});
