"""Fill in the middle: the special tokens by which a model is asked for what stands in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# (before the text in front, before the text behind, before what is wanted), as the families
# spell them: Qwen and CodeGemma; StarCoder; SantaCoder; DeepSeek.
_SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - so they are spelled
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InfillTokens:
    """Token ids that stand before the three parts; in this order.

    Attributes:
        prefix: before the text in front.
        suffix: before the text behind.
        middle: before what the model writes.
    """

    prefix: int
    suffix: int
    middle: int


def find_infill_tokens(added_tokens: Mapping[str, int]) -> InfillTokens | None:
    """Return the tokens of the first family that a tokenizer has whole; None if it has none.

    Args:
        added_tokens: spelling -> id of the tokens that stand for themselves.
    """
    for prefix, suffix, middle in _SPELLINGS:
        if {prefix, suffix, middle} <= added_tokens.keys():
            return InfillTokens(
                prefix=added_tokens[prefix],
                suffix=added_tokens[suffix],
                middle=added_tokens[middle],
            )
    return None
