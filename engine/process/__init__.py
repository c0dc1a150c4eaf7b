"""Files, locks, log, liveness and shutdown of an engine process on its machine, and the models that the machine has."""
