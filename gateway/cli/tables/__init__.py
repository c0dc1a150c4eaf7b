"""How the commands show what they were told."""
