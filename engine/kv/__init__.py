"""Moves KV pages between engines: the sockets and threads behind `engine.core.messages.moves`."""
