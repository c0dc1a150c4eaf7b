"""Reads adapters, of PEFT's folders or GGUF files, into checked blocks, or refuses them with the reason. Imports the
rooms below `adapters`."""
