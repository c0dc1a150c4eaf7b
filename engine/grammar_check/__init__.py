"""Compiles the grammars that tenants send in child processes, which a hostile grammar may kill.

`worker` runs in a child process, and `trial` in those that know a model's tokens. `process` starts one child, limits it
and asks it. `turns` decides which tenant's grammar is next. `verdicts` remembers the outcomes. `pool` puts all of these
together for the gateway (which awaits verdicts) and the engine (whose threads wait for them).
"""
