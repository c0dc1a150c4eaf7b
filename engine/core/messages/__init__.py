"""Plain data that the core exchanges with the rest: requests, their events, commands, plans of steps and their results.
Imports nothing of the core."""
