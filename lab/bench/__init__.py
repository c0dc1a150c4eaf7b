"""`loralane bench`: a load generator for any OpenAI-compatible server, and its measurements."""
