"""Servers elsewhere with OpenAI's API, as members of virtual models: requests to them, and their answers."""
