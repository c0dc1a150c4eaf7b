"""Registry of the adapters that are served: their names and versions (docs/adapters.md)."""
