"""Text and token ids: the tokenizer, chat templates and the tool calls of models."""
