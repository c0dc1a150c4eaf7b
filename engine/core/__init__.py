"""The engine's scheduling core, without third-party imports: engine state, plans of steps, and request ordering
policies."""
