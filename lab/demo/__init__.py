"""Trains the demo's adapters, on generated conversations."""
