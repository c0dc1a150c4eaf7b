"""Kernels of a GPU, written in Triton, with their plans and tunings."""
