"""Simulates a cluster of engines behind the gateway's router, or behind the routers of other systems for comparison."""
