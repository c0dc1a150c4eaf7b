"""Registry of the adapters that are served, under which names and in which versions (docs/adapters.md)."""
