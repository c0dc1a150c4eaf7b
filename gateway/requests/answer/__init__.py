"""The event stream of one answer, whichever engine processes compute its parts."""
