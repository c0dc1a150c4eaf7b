"""Looks at the state from outside: its integrity check, and reports of load for operators and routers. Changes nothing;
may import every other room."""
