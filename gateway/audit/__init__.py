"""The audit log: what administrators and configurations changed (docs/administrators.md)."""
