"""The Redis that all gateways share: an embedded server, and a pipelined client with timeouts and a circuit breaker."""
