"""Predictions that are learned from measurements: durations of steps, sizes of chunks, lengths of answers. Imports
messages and the configuration."""
