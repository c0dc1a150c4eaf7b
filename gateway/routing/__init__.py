"""Chooses the engine that serves a request, among the replicas of one base model. This room is pure: it knows no
network, no clock and no library, so that a simulation and the gateway run the same code."""
