"""Log probabilities of the raw model distribution: before penalties, temperature and filters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.blocks import block_weights, cumulative_block_mass
from sampling.ranking import best_maxima, rank_chosen, rank_leading


@dataclasses.dataclass(frozen=True, slots=True)
class RawDistribution:
    """What is needed to report one row's log probabilities.

    Attributes:
        maximum: the row's best logit.
        log_total: logarithm of the sum of exp(logit - maximum).
        top: pairs (token id, logprob), best first, ties by token id.
    """

    maximum: float
    log_total: float
    top: tuple[tuple[int, float], ...]

    def logprob(self, logit: float) -> float:
        """Return the log probability of a token by its raw logit; -inf stays -inf."""
        return logit - self.maximum - self.log_total


def raw_distributions(
    blocked: Tensor, maxima: Tensor, num_top: Sequence[int]
) -> list[RawDistribution]:
    """Return each row's log softmax, as far as it is reported.

    Args:
        blocked: [n, N * 64] float32 raw logits, not changed.
        maxima: [n, N] float32, its block maxima, a finite one in every row.
        num_top: how many best tokens each row reports.
    """
    row_maxima = maxima.amax(dim=1, keepdim=True)
    weights = block_weights(blocked, row_maxima, torch.ones_like(row_maxima))
    totals = cumulative_block_mass(weights)[:, -1].tolist()
    tops = _top_tokens(blocked, maxima.cpu(), num_top)
    results = []
    for maximum, total, top in zip(row_maxima[:, 0].tolist(), totals, tops, strict=True):
        plain = RawDistribution(maximum, math.log(total), ())
        pairs = tuple((token_id, plain.logprob(logit)) for token_id, logit in top)
        results.append(dataclasses.replace(plain, top=pairs))
    return results


def _top_tokens(
    blocked: Tensor, maxima: Tensor, num_top: Sequence[int]
) -> list[list[tuple[int, float]]]:
    """Return the ``num_top[i]`` best (token id, logit) pairs of each row."""
    if not any(num_top):
        return [[] for _ in num_top]
    wanted = torch.tensor(num_top)
    best = best_maxima(maxima, max(num_top))
    ranked = rank_leading(blocked, maxima, best, wanted.clamp(min=1))
    has_enough = (ranked.num_ranked >= wanted).tolist()
    token_ids, logits = ranked.token_ids.tolist(), ranked.logits.tolist()
    result = []
    for index, count in enumerate(num_top):
        row_ids, row_logits = token_ids[index], logits[index]
        if not has_enough[index]:
            alone = rank_chosen(blocked[index], torch.ones_like(blocked[index], dtype=torch.bool))
            row_ids, row_logits = alone.token_ids[0].tolist(), alone.logits[0].tolist()
        result.append(list(zip(row_ids[:count], row_logits[:count], strict=True)))
    return result
