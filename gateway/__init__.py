"""The gateway: OpenAI-compatible HTTP and gRPC in front of an engine."""
