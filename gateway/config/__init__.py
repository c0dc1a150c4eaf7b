"""A gateway's configuration: YAML in, frozen dataclasses out (docs/configuration.md)."""
