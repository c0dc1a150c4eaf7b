"""The engine: continuous batching of one base model and its adapters on one device."""
