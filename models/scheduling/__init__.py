"""Decides which sequences run in the next step. Holds no tensors."""
