"""Guesses of the next tokens: proposers, a predicted answer, the draft model. How many guesses a step computes is
decided in `plan`. Imports messages and predict."""
