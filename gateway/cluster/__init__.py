"""Engines on a Ray cluster: how many there should be, their start and end, and how gateways find them."""
