"""Clients through which the commands call a running gateway."""
