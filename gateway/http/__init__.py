"""The HTTP API on Starlette: its routes, the OpenAPI document, and how bytes come from callers and go to them."""
