"""How the commands ask a running gateway."""
