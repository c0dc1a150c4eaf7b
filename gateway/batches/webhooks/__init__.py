"""Telling a tenant's own server that a batch has ended: events, the outbox they wait in, and their delivery."""
