"""Reads GGUF files: header, names, block types and what they say of a model. Imports nothing of the other rooms."""
