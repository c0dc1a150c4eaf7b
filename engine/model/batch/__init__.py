"""The rows of one step, made from a plan, and the memory of its results. Imports nothing of the other rooms."""
