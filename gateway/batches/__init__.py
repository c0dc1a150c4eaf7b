"""Batches: jobs of many request lines, which survive the end of any process that works on them (docs/batches.md)."""
