"""What device and host memory hold: pages, cached prefixes, host copies of KV, and adapters with their order of
eviction. Imports messages, and knows no sequences."""
