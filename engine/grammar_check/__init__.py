"""Compiles tenants' grammars in child processes, so that a hostile grammar can only crash a child process. `pool` is
for the gateway, which awaits verdicts, and the engine, whose threads wait for them."""
