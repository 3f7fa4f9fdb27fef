"""top_k, top_p, min_p and typical_p on ranked tokens: how many of the leading ones stay.

The first three keep a leading part of the order of ``sampling.ranking``, so each is one number
per row; each looks at what the one before it has left. At least the best token always stays.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from sampling.batch import SamplingBatch
from sampling.ranking import RankedTokens

_UNLIMITED = 2**62
# In units of the exponent; float32 rounding of it is below 1e-5.
_ROUNDING_MARGIN = 1e-3
# Of the mass; float32 rounding of single weights is below 1e-6.
_RELATIVE_MARGIN = 1e-5
# The histogram of scaled logits: 1024 steps of 1/8, the last one takes all below -128.
_NUM_STEPS_PER_UNIT = 8
_NUM_STEPS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class KeptTokens:
    """What the filters leave of n ranked rows.

    Attributes:
        weights: [n, W] float64, exp((logit - maximum) / temperature); 0 in the padding.
        num_kept: [n] int64, how many leading tokens stay, at least 1.
        is_decided: [n] bool, whether more ranked tokens could not change ``num_kept``.
    """

    weights: Tensor
    num_kept: Tensor
    is_decided: Tensor


def scaled_logits(logits: Tensor, row_maxima: Tensor, temperature: Tensor) -> Tensor:
    """Return (logit - maximum) / temperature in float32, element by element."""
    return (logits - row_maxima) / temperature


def count_kept(
    ranked: RankedTokens, row_maxima: Tensor, batch: SamplingBatch, totals: Tensor
) -> KeptTokens:
    """Apply temperature, top_k, top_p and min_p to ranked tokens.

    - top_k keeps the k first.
    - top_p keeps the shortest leading part whose mass is at least p of what top_k has left: a
      token stays if the mass before it is below p. 0 keeps the first token.
    - min_p keeps tokens of at least min_p times the first one's weight.

    Args:
        ranked: n rows.
        row_maxima: [n, 1] float32, each row's best logit, on the host.
        batch: n rows.
        totals: [n] float64, weight of the whole row; read for rows with top_p but no top_k.
    """
    scaled = scaled_logits(ranked.logits, row_maxima, batch.temperature).to(torch.float64)
    weights = scaled.exp()
    cumulative = weights.cumsum(dim=1)
    num_ranked = ranked.num_ranked

    has_top_k = batch.top_k > 0
    top_k_limit = torch.where(has_top_k, batch.top_k, _UNLIMITED)
    has_all_of_top_k = (top_k_limit <= num_ranked) | ranked.is_complete
    last_place = (torch.minimum(top_k_limit, num_ranked) - 1).clamp(min=0)
    top_k_mass = cumulative.gather(1, last_place[:, None])[:, 0]

    wanted_mass = batch.top_p * torch.where(has_top_k, top_k_mass, totals)
    mass_before = torch.cat((torch.zeros_like(cumulative[:, :1]), cumulative[:, :-1]), dim=1)
    top_p_count = (mass_before < wanted_mass[:, None]).sum(dim=1)
    has_top_p = batch.top_p < 1.0
    top_p_limit = torch.where(has_top_p, top_p_count, _UNLIMITED)
    is_top_p_reached = has_top_p & (cumulative[:, -1] >= wanted_mass)

    min_p_count = (scaled >= batch.log_min_p[:, None]).sum(dim=1)
    is_min_p_reached = min_p_count < num_ranked

    limits = torch.stack((num_ranked, top_k_limit, top_p_limit, min_p_count))
    is_decided = torch.where(
        has_top_k, has_all_of_top_k, ranked.is_complete | is_top_p_reached | is_min_p_reached
    )
    return KeptTokens(
        weights=weights,
        num_kept=limits.amin(dim=0).clamp(min=1),
        is_decided=is_decided & (num_ranked > 0),
    )


def scaled_bound(scaled: Tensor, batch: SamplingBatch, total: float) -> float:
    """Return a value of the scaled logits below which the filters certainly keep nothing.

    For min_p that is its own limit. For top_p a histogram finds the first step of 1/8 at which
    the mass from the top is enough. With some room for rounding. -inf if no filter says anything,
    or if top_p needs the mass of a top_k, which may reach below the limit of min_p.

    Args:
        scaled: [V] float32, at most 0, on the host.
        batch: the row's columns.
        total: weight of the whole row; read for top_p without top_k.
    """
    bound = float(batch.log_min_p) - _ROUNDING_MARGIN
    if float(batch.top_p) == 1.0:
        return bound
    if int(batch.top_k) > 0:
        return -math.inf
    steps = (scaled * -_NUM_STEPS_PER_UNIT).clamp(max=_NUM_STEPS - 1).to(torch.int64)
    mass_by_step = torch.bincount(
        steps, weights=scaled.exp().to(torch.float64), minlength=_NUM_STEPS
    )
    wanted_mass = float(batch.top_p) * total * (1.0 + _RELATIVE_MARGIN)
    num_short = int((mass_by_step.cumsum(dim=0) < wanted_mass).sum())
    if num_short >= _NUM_STEPS - 1:
        return bound
    return max(bound, -(num_short + 1) / _NUM_STEPS_PER_UNIT)


def typical_weights(weights: Tensor, typical_p: float) -> Tensor:
    """Return the weights with those outside of the locally typical set put to 0.

    Tokens are taken by how near their information content (-log p) is to the entropy of the row,
    nearest first, ties by rank, until their mass is at least ``typical_p``. (Meister, Pimentel,
    Wiher, Cotterell: Locally Typical Sampling, 2022.)

    Args:
        weights: [K] float64 of one row, what the other filters have left, the first above 0.
        typical_p: in (0, 1].
    """
    # Sums by cumsum: in order, whatever the length and the number of threads.
    probabilities = weights / weights.cumsum(dim=0)[-1]
    information = -probabilities.log()
    terms = torch.where(probabilities > 0.0, probabilities * information, 0.0)
    entropy = terms.cumsum(dim=0)[-1]
    order = (information - entropy).abs().sort(stable=True).indices
    mass = probabilities[order].cumsum(dim=0)
    num_kept = 1 + int((mass[:-1] < typical_p).sum())
    result = torch.zeros_like(weights)
    kept = order[:num_kept]
    result[kept] = weights[kept]
    return result
