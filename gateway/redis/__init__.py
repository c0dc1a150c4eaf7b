"""The Redis that gateways share: an embedded server, and calls that are batched, timed and cut off when it is away."""
