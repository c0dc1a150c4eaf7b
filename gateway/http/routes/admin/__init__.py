"""The routes of administrators, a module for each subject: vLLM's two for adapters, and everything below /admin/v1."""
