"""One model on several ranks: tensor parallelism within a stage (Megatron, Shoeybi et al. 2019; adapters as in S-LoRA,
Sheng et al. 2023), pipeline parallelism between stages. Rank 0 sends the engine's plans to the others, and samples."""
