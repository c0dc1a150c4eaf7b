"""OpenAI's bodies: understood on the way in, rendered on the way out (docs/openai.md)."""
