"""Computes steps up to their logits: as captured graphs or tapes, or kernel by kernel; warms them up. Imports `decode`,
`sample`, `memory` and what is below."""
