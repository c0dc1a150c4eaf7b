"""CPU kernels, compiled by numba, and the threads, vector operations and matrix products that they are built on."""
