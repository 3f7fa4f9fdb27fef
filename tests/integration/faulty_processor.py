"""A logits processor that breaks its law for requests that ask for it: the step loop dies of it."""

FATAL_BIAS = -99.125


class FaultyProcessor:
    """Raises in the step of a row that has FATAL_BIAS on some token."""

    is_argmax_invariant = False

    def make_state(self, row):
        """Return a state for such a row only."""
        return True if any(bias == FATAL_BIAS for _, bias in row.params.logit_bias) else None

    def apply_(self, logits, active):
        """Raise."""
        raise RuntimeError("a fault that a test injects")
