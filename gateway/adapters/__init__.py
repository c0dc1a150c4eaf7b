"""Which adapters are served, under which names and in which version (docs/adapters.md)."""
