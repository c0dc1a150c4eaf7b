"""A soak test: checks that a server's memory and other resources do not grow under long and varied use."""
