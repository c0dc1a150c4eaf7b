"""What a model is: the `ModelSpec` that config.json says, a function for each family, rotary embeddings, fused
projections. Imports `checkpoints`, for the formats of weights that a configuration names."""
