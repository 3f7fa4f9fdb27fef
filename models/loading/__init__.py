"""From a path to a model that is known to compute what transformers computes."""
