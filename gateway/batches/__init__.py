"""Batches: jobs of many lines that outlive any process that works on them (docs/batches.md)."""
