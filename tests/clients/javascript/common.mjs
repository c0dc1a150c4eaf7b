// The demo that tests/clients/test_javascript.py serves, and what its answers are asked for.
export const url = process.env.LORALANE_URL;
export const key = "sk-demo-acme";
export const model = "tools";
export const question = "What is the capital of France?";
export const weather = {
  name: "weather",
  description: "Get the current weather in a city",
  parameters: {
    type: "object",
    properties: { city: { type: "string", maxLength: 12 } },
    required: ["city"],
    additionalProperties: false,
  },
};

export async function collect(pieces, textOf) {
  const texts = [];
  for await (const piece of pieces) texts.push(textOf(piece) ?? "");
  return texts.filter((text) => text !== "");
}
