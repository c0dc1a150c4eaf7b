"""OpenAI's HTTP API, its files, batches and administration, on starlette."""
