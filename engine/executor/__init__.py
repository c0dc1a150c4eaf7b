"""Executors run step plans: their interface, cost models that predict step durations, and executors without a model."""
