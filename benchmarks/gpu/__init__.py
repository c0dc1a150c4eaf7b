"""The GPU suite: what a device says of our kernels and our engine. See README.md."""
