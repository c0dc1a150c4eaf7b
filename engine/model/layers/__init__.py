"""Parts of a layer that adapters change: linears with LoRA, and feed-forward. Imports `spec` and `weights`."""
