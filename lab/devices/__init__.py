"""Devices as arithmetic: what a step costs on each, measured or by its data sheet, and what fits on it."""
