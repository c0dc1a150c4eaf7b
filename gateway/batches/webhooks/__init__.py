"""Webhooks that notify a tenant's own server of the end of a batch: events, their outbox, and their delivery."""
