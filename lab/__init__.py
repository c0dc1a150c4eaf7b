"""What no server imports: simulator, planner, analysis of traffic, load generator, evaluation, training of routers."""
