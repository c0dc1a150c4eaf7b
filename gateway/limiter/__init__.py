"""Limits of requests and tokens: charged exactly in Redis, and locally while Redis is away."""
