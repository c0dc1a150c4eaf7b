"""Parses OpenAI request bodies and renders OpenAI response bodies (docs/openai.md)."""
