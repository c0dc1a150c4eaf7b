"""Replays traffic on the real scheduling core: a virtual clock, a cost model in the device's place, and no model."""
