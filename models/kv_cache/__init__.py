"""KV cache: a ledger of blocks (no tensors) and a pool of tensors (no policy)."""
