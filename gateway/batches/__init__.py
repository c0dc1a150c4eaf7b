"""Batches: jobs of many lines that survive the end of any process that works on them (docs/batches.md)."""
