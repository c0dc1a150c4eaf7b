"""LoRA and attention kernels of a step, for each kind of device."""
