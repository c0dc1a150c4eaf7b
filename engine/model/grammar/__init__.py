"""Grammars of running requests: compiles them, and makes masks of the tokens that they allow. Imports `sample`."""
