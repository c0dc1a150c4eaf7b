"""Traffic, recorded or made up: its requests, and what they look like."""
