"""LoRA, attention and pointwise kernels, for GPUs (`gpu`, also for sampling), CPUs (`cpu`) and torch (`portable`)."""
