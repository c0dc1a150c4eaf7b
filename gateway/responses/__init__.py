"""OpenAI's Responses API: parses its request bodies and renders its responses and typed events (docs/openai.md)."""
