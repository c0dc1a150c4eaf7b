"""A small task of lm-eval that needs no network: `demo_capitals`."""
