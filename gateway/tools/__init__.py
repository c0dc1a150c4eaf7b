"""Tool calls in the text of an answer: the dialects in which models write them, read while they are written."""
