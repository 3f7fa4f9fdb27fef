"""Log probabilities and ranks of known tokens: those of a prompt. Draws nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.blocks import block_maxima, take_rows, to_blocked
from sampling.errors import NonFiniteLogitsError, RowSamplingError
from sampling.logprobs import raw_distributions

# Rows that are worked on at a time: with 150,000 tokens one copy of them takes 19 MB.
SLICE_ROWS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class KnownToken:
    """One token under the raw model distribution of the row before it.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability; may be -inf.
        rank: its place in the order of falling logits, ties by token id; 1 is the best.
        top: pairs (token id, logprob) of the best tokens, best first, ties by token id.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def prompt_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[KnownToken | RowSamplingError]:
    """Return what each row's distribution says of the token that follows it.

    The same numbers, bit for bit, that a row reports for a token it draws. A row's result does not
    depend on the other rows. Beside the logits it takes memory for ``SLICE_ROWS`` rows.

    Args:
        logits: [C, V] of any floating dtype on any device; not changed.
        token_ids: C ids in [0, V): the token that follows each row.
        num_top: C counts, at least 0: how many best tokens each row reports. A token of
            probability 0 is not among them.

    Returns:
        One entry per row, in their order; a NonFiniteLogitsError for a row whose logits are NaN or
        +inf, or -inf for every token.
    """
    results: list[KnownToken | RowSamplingError] = []
    for start in range(0, len(token_ids), SLICE_ROWS):
        rows = slice(start, start + SLICE_ROWS)
        results.extend(_slice_logprobs(logits[rows], token_ids[rows], num_top[rows]))
    return results


def _slice_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[KnownToken | RowSamplingError]:
    blocked = to_blocked(logits)
    maxima = block_maxima(blocked)
    is_sound = maxima.amax(dim=1).isfinite().tolist()
    results: list[KnownToken | RowSamplingError] = [NonFiniteLogitsError() for _ in token_ids]
    sound = [index for index, is_finite in enumerate(is_sound) if is_finite]
    if not sound:
        return results
    blocked, maxima = take_rows(blocked, sound), take_rows(maxima, sound)
    following = [token_ids[index] for index in sound]
    chosen = blocked[range(len(sound)), following].tolist()
    distributions = raw_distributions(blocked, maxima, [num_top[index] for index in sound])
    ranks = _ranks(blocked, following, chosen)
    for place, index in enumerate(sound):
        distribution = distributions[place]
        results[index] = KnownToken(
            following[place],
            distribution.logprob(chosen[place]),
            ranks[place],
            distribution.top,
        )
    return results


def _ranks(blocked: Tensor, token_ids: Sequence[int], chosen: Sequence[float]) -> list[int]:
    """Return the rank of one token of each row.

    Row by row, since torch counts a whole vector four times as fast as rows of a matrix.

    Args:
        blocked: [n, N * 64] float32; its padding stands behind the vocabulary, so it is never
            counted as equal and before.
        token_ids: n ids.
        chosen: n logits, those of the tokens.
    """
    counts = [
        (row[:token_id] >= logit).count_nonzero() + (row[token_id:] > logit).count_nonzero()
        for row, token_id, logit in zip(blocked, token_ids, chosen, strict=True)
    ]
    ranks: list[int] = (torch.stack(counts) + 1).tolist()
    return ranks
