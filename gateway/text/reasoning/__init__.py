"""Reasoning in answers: which part of an answer it is, and grammars that begin after it."""
