"""Trains the demo's adapters on generated conversations, and writes the embedded model as dense weights for that."""
