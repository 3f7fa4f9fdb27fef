"""Logits and per-row parameters in, tokens and log probabilities out."""
