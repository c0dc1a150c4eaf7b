"""One model on several ranks: tensor parallelism in stages, of which each may have a part of every large weight and of
the KV heads, and pipeline parallelism between stages, of which each has some consecutive layers.

The split in a stage is Megatron's (Shoeybi et al. 2019), and adapters are split with their base weights as in S-LoRA
(Sheng et al. 2023, section 6). `shard.py` says which rank has what. Rank 0 plans nothing itself: it gets the engine's
plans, sends each of them to the other ranks, and samples.
"""
