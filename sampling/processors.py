"""What may change a row's logits before temperature: one protocol, and a loader by dotted path."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sampling.batch import SamplingRow
from sampling.errors import InvalidSamplingParamsError


@dataclasses.dataclass(slots=True, eq=False)
class ActiveRow:
    """A row that a processor has to do with in this step.

    Nobody changes it; it is not frozen because a frozen one takes three times as long to make, and
    a step makes one for each row and processor.

    Attributes:
        index: the row's place in the logits that ``apply_`` gets, which are not always those of
            all rows.
        row: its request, prompt and output.
        state: what ``make_state`` returned when the row joined.
    """

    index: int
    row: SamplingRow
    state: Any


@runtime_checkable
class LogitsProcessor(Protocol):
    """Changes the logits of the rows that need it, and of no other row.

    The state belongs to the row, not to the processor: it is made when the row joins and dropped
    with it. Nobody tells a state of new tokens; it catches up from ``row.output_token_ids`` in
    ``apply_``, which makes a resumed row the same as an undisturbed one.

    Law: what it does to one row must not depend on the others, on ``index`` or on the number of
    rows. It must not raise, make NaN or make +inf; -inf means that a token cannot be chosen. It
    may meet a row whose logits are NaN or +inf: that row fails afterwards, whatever it does. On a
    device it must not wait for values (``item``, ``nonzero``, indexing by a mask).

    Owner: step thread.

    Attributes:
        is_argmax_invariant: it never changes which token is the best one. Greedy rows skip it.
    """

    is_argmax_invariant: bool

    def make_state(self, row: SamplingRow) -> Any | None:
        """Return the row's state, or None if this processor does nothing for it."""

    def apply_(self, logits: Tensor, active: Sequence[ActiveRow]) -> None:
        """Change ``logits[each.index]`` in place for each active row.

        Args:
            logits: [n, V] float32, the sampler's own copy of the rows that any processor changes.
            active: the rows with a state, at least one, by rising index.
        """


def load_processor(path: str) -> LogitsProcessor:
    """Make the processor that ``package.module:Name`` names, by calling it without arguments.

    Args:
        path: module and attribute (a class or a factory) with a colon between them.

    Raises:
        InvalidSamplingParamsError: the path has another form, cannot be imported, or names
            something that does not make a LogitsProcessor.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise InvalidSamplingParamsError(
            "logits_processors", f"'{path}' does not have the form package.module:Name"
        )
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidSamplingParamsError(
            "logits_processors", f"'{path}' cannot be imported: {error}"
        ) from error
    try:
        processor = factory()
    except TypeError as error:
        raise InvalidSamplingParamsError(
            "logits_processors", f"'{path}' cannot be made without arguments: {error}"
        ) from error
    if not isinstance(processor, LogitsProcessor):
        raise InvalidSamplingParamsError(
            "logits_processors", f"'{path}' does not make a LogitsProcessor"
        )
    return processor
