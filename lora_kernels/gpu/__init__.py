"""GPU kernels, written in Triton, with the plans that the host makes for them and their launch configurations."""
