"""What no server imports: simulator, plans, load generator, evaluation, and training of routers and demo adapters."""
