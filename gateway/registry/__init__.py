"""Named records in Redis that every gateway follows: one script per change, and one ordered log (docs/adapters.md)."""
