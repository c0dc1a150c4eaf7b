"""The model on a device: weights, decoder, sampling, grammars, adapters and the runner that executes plans."""
