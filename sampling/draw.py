"""Random draws from logits that penalties and masks have been applied to: one token per row."""

from __future__ import annotations

import torch
from torch import Tensor

from sampling.batch import SamplingBatch
from sampling.blocks import (
    block_weights,
    cumulative_block_mass,
    draw_by_token_id,
    invert_cumulative,
    take_rows,
)
from sampling.filters import (
    KeptTokens,
    count_kept,
    scaled_bound,
    scaled_logits,
    typical_weights,
)
from sampling.ranking import RankedTokens, best_maxima, rank_chosen, rank_leading

# How many tokens are ranked before it is known that a row needs more.
MAX_NUM_RANKED_FIRST = 256


def draw_plain(blocked: Tensor, row_maxima: Tensor, batch: SamplingBatch) -> list[int]:
    """Draw from the whole distribution at each row's temperature.

    Args:
        blocked: [n, N * 64] float32, not changed.
        row_maxima: [n, 1] float32, finite.
        batch: n rows without filters.
    """
    weights = block_weights(blocked, row_maxima, batch.temperature.to(blocked.device))
    tokens: list[int] = draw_by_token_id(weights, batch.uniform).tolist()
    return tokens


def draw_filtered(blocked: Tensor, maxima: Tensor, batch: SamplingBatch) -> list[int]:
    """Draw from what top_k, top_p, min_p and typical_p leave of each row.

    The filters first see the few tokens that will do for most rows; a row that needs more is
    ranked again by itself. Both ways give the same token, since a ranked part is always the
    beginning of the same order and is added up in that order.

    Args:
        blocked: [n, N * 64] float32, not changed.
        maxima: [n, N] float32, its block maxima, a finite one in every row.
        batch: n rows, each with at least one filter.
    """
    maxima = maxima.cpu()
    row_maxima = maxima.amax(dim=1, keepdim=True)
    totals = _totals(blocked, row_maxima, batch)
    best = best_maxima(maxima, max(MAX_NUM_RANKED_FIRST, int(batch.top_k.max())))
    num_wanted = _num_wanted(best[:, :MAX_NUM_RANKED_FIRST], row_maxima, batch, totals)
    ranked = rank_leading(blocked, maxima, best, num_wanted)
    kept = count_kept(ranked, row_maxima, batch, totals)
    tokens = _draw_kept(ranked, kept, batch)
    for index in (~kept.is_decided).nonzero()[:, 0].tolist():
        row = slice(index, index + 1)
        tokens[index] = _draw_alone(
            blocked[index].cpu(), row_maxima[row], batch.select(index), totals[row]
        )
    return tokens


def _totals(blocked: Tensor, row_maxima: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the weight of whole rows, [n] float64; 0 where no filter reads it."""
    is_read = (batch.top_p < 1.0) & (batch.top_k == 0)
    totals = torch.zeros(len(is_read), dtype=torch.float64)
    indices = is_read.nonzero()[:, 0].tolist()
    if indices:
        weights = block_weights(
            take_rows(blocked, indices),
            take_rows(row_maxima, indices).to(blocked.device),
            take_rows(batch.temperature, indices).to(blocked.device),
        )
        totals[is_read] = cumulative_block_mass(weights)[:, -1]
    return totals


def _num_wanted(best: Tensor, row_maxima: Tensor, batch: SamplingBatch, totals: Tensor) -> Tensor:
    """Guess from the best block maxima how many tokens each row's filters will need, [n] int64.

    Every block maximum is a token: if the k best of them hold the mass that top_p wants, so do
    the k best tokens. A bad guess costs time and changes nothing.
    """
    scaled = scaled_logits(best, row_maxima, batch.temperature).to(torch.float64)
    mass = scaled.exp().cumsum(dim=1)
    for_top_p = 1 + (mass < (batch.top_p * totals)[:, None]).sum(dim=1)
    for_min_p = 1 + (scaled >= batch.log_min_p[:, None]).sum(dim=1)
    has_top_p = (batch.top_p < 1.0) & (batch.top_k == 0)
    wanted = torch.where(has_top_p, torch.minimum(for_top_p, for_min_p), for_min_p)
    return torch.where(batch.top_k > 0, batch.top_k, wanted.clamp(max=MAX_NUM_RANKED_FIRST))


def _draw_alone(row: Tensor, row_maximum: Tensor, batch: SamplingBatch, total: Tensor) -> int:
    """Draw for one row ([N * 64] float32, on the host) from all tokens its filters could keep."""
    scaled = scaled_logits(row, row_maximum[0], batch.temperature[0])
    bound = scaled_bound(scaled, batch, float(total))
    ranked = rank_chosen(row, scaled >= bound)
    return _draw_kept(ranked, count_kept(ranked, row_maximum, batch, total), batch)[0]


def _draw_kept(ranked: RankedTokens, kept: KeptTokens, batch: SamplingBatch) -> list[int]:
    """Invert the cumulative weights of the kept tokens in order of rank."""
    places = torch.arange(kept.weights.shape[1])
    weights = torch.where(places < kept.num_kept[:, None], kept.weights, 0.0)
    for index, typical_p in enumerate(batch.typical_p):
        if typical_p < 1.0 and bool(kept.is_decided[index]):
            num_kept = int(kept.num_kept[index])
            weights[index, :num_kept] = typical_weights(weights[index, :num_kept], typical_p)
    cumulative = weights.cumsum(dim=1)
    ranks = invert_cumulative(cumulative, batch.uniform * cumulative[:, -1])
    tokens: list[int] = ranked.token_ids.gather(1, ranks[:, None])[:, 0].tolist()
    return tokens
