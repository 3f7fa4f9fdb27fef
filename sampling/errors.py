"""Errors of the sampling module.

    SamplingError(ValueError)
      InvalidSamplingParamsError   a parameter is out of range (the caller's fault)
      RowSamplingError             one row of a batch cannot be sampled; its neighbours can
        NonFiniteLogitsError       the model gave NaN, +inf or only -inf for this row
        NoTokenLeftError           masks and bias leave no token to choose

Every class keeps the pickle rule: positional constructor, the same values to
``super().__init__``, text made in ``__str__``, fields of str, int or float only.
"""


class SamplingError(ValueError):
    """Root of everything that ``sampling`` raises on purpose."""


class InvalidSamplingParamsError(SamplingError):
    """A sampling parameter is outside of its documented range."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(param, reason)
        self.param = param
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.param}: {self.reason}"


class RowSamplingError(SamplingError):
    """One row cannot be sampled; all other rows of the batch are unaffected."""


class NonFiniteLogitsError(RowSamplingError):
    """The model produced NaN or +inf, or -inf for every token, in this row."""

    def __str__(self) -> str:
        return "the model produced logits that are not numbers for this sequence"


class NoTokenLeftError(RowSamplingError):
    """Masks and biases of this row leave no token that could be chosen."""

    def __str__(self) -> str:
        return "the constraints of this request leave no token to choose"
