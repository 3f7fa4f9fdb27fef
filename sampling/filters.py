"""top_k, top_p, min_p and typical_p on ranked tokens: how many of the leading ones stay.

The first three keep a leading part of the order of ``sampling.ranking``, so each is one number
per row; each looks at what the one before it has left. At least the best token always stays.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sampling.batch import SamplingBatch
from sampling.blocks import exact_mass, scaled_logits
from sampling.ranking import RankedTokens

_UNLIMITED = 2**62


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
        row_maxima: [n, 1] float32, each row's best logit.
        batch: n rows.
        totals: [n] float64, weight of the whole row; read for rows with top_p but no top_k.
    """
    scaled = scaled_logits(ranked.logits, row_maxima, batch.temperature)
    weights = exact_mass(scaled.exp())
    cumulative = weights.cumsum(dim=1)
    num_ranked = ranked.num_ranked

    has_top_k = batch.top_k > 0
    top_k_limit = torch.where(has_top_k, batch.top_k, _UNLIMITED)
    has_all_of_top_k = (top_k_limit <= num_ranked) | ranked.is_complete
    last_place = (torch.minimum(top_k_limit, num_ranked) - 1).clamp(min=0)
    top_k_mass = cumulative.gather(1, last_place[:, None])[:, 0]

    wanted_mass = batch.top_p * torch.where(has_top_k, top_k_mass, totals)
    # How much lies before a place is one column of the running sum and a 0 in front of it.
    num_short = (cumulative[:, :-1] < wanted_mass[:, None]).sum(dim=1)
    top_p_count = num_short + (wanted_mass > 0.0)
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


def typical_weights(weights: Tensor, typical_p: Tensor) -> Tensor:
    """Return the weights with those outside of the locally typical set put to 0.

    Tokens are taken by how near their information content (-log p) is to the entropy of the row,
    nearest first, ties by rank, until their mass is at least ``typical_p``. (Meister, Pimentel,
    Wiher, Cotterell: Locally Typical Sampling, 2022.)

    Args:
        weights: [n, K] float64 of ``exact_mass``, what the other filters have left, the first of
            a row above 0.
        typical_p: [n] float64 in (0, 1].
    """
    totals = weights.sum(dim=1, keepdim=True)
    probabilities = weights / totals
    information = probabilities.log().neg_()
    is_possible = weights > 0.0
    terms = torch.where(is_possible, probabilities * information, 0.0)
    # A term is below 1; rounded, their sum is the same in any order.
    entropy = exact_mass(terms).sum(dim=1, keepdim=True)
    distance = information.sub_(entropy).abs_()
    distance = torch.where(is_possible, distance, torch.inf)
    order = distance.sort(dim=1, stable=True).indices
    mass = weights.gather(1, order).cumsum(dim=1)
    is_short = mass[:, :-1] < typical_p[:, None] * totals
    is_kept = torch.nn.functional.pad(is_short, (1, 0), value=True)
    return torch.where(torch.empty_like(is_kept).scatter_(1, order, is_kept), weights, 0.0)
