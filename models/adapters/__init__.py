"""PEFT adapters: where they come from, what they are, what of them is in memory."""
