"""Vectors of texts: OpenAI's /v1/embeddings, and /v1/rerank and /v1/score, which compare vectors (docs/openai.md)."""
