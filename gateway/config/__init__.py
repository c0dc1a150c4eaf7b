"""Reads a gateway's YAML configuration into frozen dataclasses (docs/configuration.md)."""
