"""One model on several ranks: the ranks of a stage share out every large weight and the KV heads of its layers (tensor
parallelism), and each stage has some consecutive layers (pipeline parallelism).

The split in a stage is Megatron's (Shoeybi et al. 2019), and adapters are split with their base weights as in S-LoRA
(Sheng et al. 2023, section 6). `ranks/shard.py` says which rank has what. Rank 0 plans nothing itself: it gets the
engine's plans, sends each of them to the other ranks, and samples. This room has the processes, and imports `runner`.
"""
