"""Reads a model's weights, or makes random ones, and quantises them. Imports `spec` and the formats: `checkpoints` and
`gguf`."""
