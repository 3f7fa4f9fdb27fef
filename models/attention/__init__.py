"""Attention over block-managed KV, behind the attention interface of transformers."""
