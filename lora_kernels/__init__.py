"""LoRA, attention, pointwise and sampling kernels, for GPUs (`gpu`), for CPUs (`cpu`) and in torch (`portable`)."""
