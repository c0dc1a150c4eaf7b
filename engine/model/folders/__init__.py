"""Makes folders that the engine reads of models that users name: finds, downloads and converts them. Imports
`tokenizers` and `gguf`; nothing of the running engine imports this room but its program, `folders/prepare.py`."""
