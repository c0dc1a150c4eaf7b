"""Parses tool calls from the text of an answer while it is generated, for the dialects in which models write them."""
