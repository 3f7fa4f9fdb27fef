"""Executes step plans: the only caller of the model."""
