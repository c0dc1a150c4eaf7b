"""Triton's kernels on a machine without a GPU: a quicker interpreter, and a CUDA driver that only reports launches."""
