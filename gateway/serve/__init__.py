"""What `loralane serve` starts, ties together and stops: processes, their ports, their signals."""
