"""`python -m gateway` is `loralane`."""

from gateway.cli.main import main

main()
