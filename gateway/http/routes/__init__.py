"""The routes of the HTTP API by subject, each with its handlers; those of administrators are in `admin`."""
