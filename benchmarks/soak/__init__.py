"""Whether a server stays as it is while it is used in every way for a long time."""
