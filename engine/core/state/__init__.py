"""The engine's state: sequences, their queue, steps under way, grammars and measurements. It only holds data: `commit`
changes it, and `plan` reads it. Imports the rooms of its parts: memory, speculate, fairness, predict and messages."""
