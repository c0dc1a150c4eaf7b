"""Simulates traffic on the real scheduling core, with a virtual clock and a cost model but without a device."""
