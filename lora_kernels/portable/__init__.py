"""The same operations in plain torch, for devices without kernels of their own."""
