"""What runs a plan: the interface, its costs, and a fake without a model."""
