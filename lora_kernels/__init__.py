"""LoRA, attention and pointwise kernels: `gpu` (also sampling), `cpu`, and in plain torch `reference`."""
