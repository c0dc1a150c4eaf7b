"""Compiles tenants' grammars in child processes, so that a hostile grammar can only crash a child process.

`worker` runs in a child process; `trial` also runs there if the child knows a model's tokens. `process` starts one
child, limits it and sends it grammars. `job` has the messages between the two and remembers verdicts. `source` converts
grammars to the library's format. `turns` decides which tenant's grammar is next. `pool` puts all of these together for
the gateway (which awaits verdicts) and the engine (whose threads wait for them).
"""
