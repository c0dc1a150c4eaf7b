"""The typed client of a gateway: what OpenAI's own client has no methods for."""
