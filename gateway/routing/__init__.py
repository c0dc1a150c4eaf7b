"""Chooses the engine that serves a request, among the replicas of one base model. This package is pure: it uses no
network, no clock and no library, so that a simulation and the gateway run the same code."""
