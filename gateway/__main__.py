"""`python -m gateway` is `loralane`."""

from gateway.cli import main

main()
