"""The kernels' operations in plain torch, for CPUs without numba."""
