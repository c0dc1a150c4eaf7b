"""Chooses tokens from logits, and makes logprobs and vectors of hidden states, on the CPU or on a GPU. Imports
`batch`."""
