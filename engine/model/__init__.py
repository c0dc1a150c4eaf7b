"""The model on a device: weights, decoder, sampling, grammars, adapters and the runner that executes plans. Rooms
import those below them (see `[tool.importlinter]`)."""
