"""The GPU suite: correctness and performance of the kernels and the engine on a GPU. See README.md."""
