"""Executes plans: loads a model, fills in sizes, submits steps and collects results; the draft model. Imports every
room but `parallel` and `folders`."""
