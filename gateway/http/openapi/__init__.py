"""/openapi.json: the HTTP API's document, from what bodies are validated against and from the error table."""
