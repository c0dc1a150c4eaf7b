"""The command `loralane`."""
