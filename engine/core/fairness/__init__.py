"""Arithmetic of fairness between tenants: counters of service, and shares of a capacity. The order that follows from
these is in `policy`. Imports messages."""
