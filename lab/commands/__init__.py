"""Subcommands of `loralane`, which `gateway/cli/subcommands.py` names."""
