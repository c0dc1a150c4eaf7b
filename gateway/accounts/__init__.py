"""Tenants and their keys, live: a registry in Redis that every gateway follows (docs/tenants.md)."""
