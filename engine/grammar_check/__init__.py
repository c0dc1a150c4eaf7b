"""Compiles tenants' grammars in child processes, so that a hostile grammar can only crash a child process.

`worker` runs in a child process; `trial` also runs there if the child knows a model's tokens. `process` starts one
child, limits it and sends it grammars. `turns` decides which tenant's grammar is next. `verdicts` remembers the
outcomes. `pool` puts all of these together for the gateway (which awaits verdicts) and the engine (whose threads wait
for them).
"""
