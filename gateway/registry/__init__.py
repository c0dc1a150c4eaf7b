"""Named records in Redis that every gateway follows: one script a change, one log, one order (docs/adapters.md)."""
