"""Tensor parallelism: one model on several ranks, of which each has a part of every large weight and of the KV heads.

The split is Megatron's (Shoeybi et al. 2019), and adapters are split with their base weights as in S-LoRA (Sheng et al.
2023, section 6). Rank 0 plans nothing itself: it gets the engine's plans, sends each of them to the other ranks, and
samples. docs/parallel.md describes what is split, and what a step exchanges.
"""
