"""Reads adapter files and packs them for kernels: `peft` reads and checks, `packing` and `recipes` pack, `fetcher` does
so in threads. Imports `memory`, `layers`, `ranks`, `weights`, `spec` and `gguf`."""
