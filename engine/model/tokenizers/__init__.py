"""Reads vocabularies of several file formats and builds tokenizers of them. Imports `gguf`, whose files have one,
too."""
