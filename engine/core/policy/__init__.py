"""The order in which sequences are served and preempted: policies, fairness between tenants, preemption. Reads the
state, and knows nothing of plans."""
