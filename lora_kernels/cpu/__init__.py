"""Kernels of a CPU, compiled by numba, and their threads, vectors and products."""
