"""The engine's scheduling core, without third-party imports: the state of an engine, plans of its steps, and what
changes the state. `config.py` has its settings; rooms import those below them (see `[tool.importlinter]`)."""
