"""Tables in which the commands show a gateway's answers."""
