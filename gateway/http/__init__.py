"""The HTTP API on Starlette: OpenAI's endpoints including files and batches, and administration."""
