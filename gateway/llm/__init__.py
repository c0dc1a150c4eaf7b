"""The Python API: `LLM` and `AsyncLLM` run a model in the process of their caller."""
