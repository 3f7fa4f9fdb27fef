"""A served model, from weights to a stream of tokens. Knows no Ray and no HTTP."""
