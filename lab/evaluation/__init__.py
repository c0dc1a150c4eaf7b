"""Evaluates a base model and its adapters: scores of lm-eval, and drifts of weights."""
