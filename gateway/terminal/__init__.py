"""What every command shows on a terminal, and how clients of a gateway check its certificate."""
