"""Output of commands on a terminal, and the TLS settings of their connections to a gateway."""
