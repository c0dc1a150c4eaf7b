"""Tenants and their API keys, in a registry in Redis that every gateway follows (docs/tenants.md)."""
