"""Implements `loralane serve`: starts, connects and stops its processes, and handles their ports and signals."""
