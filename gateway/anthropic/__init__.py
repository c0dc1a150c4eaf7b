"""Anthropic's Messages API: parses its request bodies and renders its responses, events and errors."""
