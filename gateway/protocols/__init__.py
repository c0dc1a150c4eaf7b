"""The way of a request for a generation from its body to `Gateway.generate`, whatever carries it."""
