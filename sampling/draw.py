"""Random draws from logits that penalties and masks have been applied to: one token per row."""

from __future__ import annotations

import torch
from torch import Tensor

from sampling.batch import SamplingBatch
from sampling.blocks import (
    cumulative_mass,
    draw_by_token_id,
    invert_cumulative,
    scaled_logits,
    send,
    take_rows,
)
from sampling.filters import KeptTokens, count_kept, typical_weights
from sampling.host_arrays import integers
from sampling.ranking import RankedTokens, best_maxima, rank_best, rank_chosen, rank_leading
from sampling.wide_draw import draw_wide, kept_bound

# How many tokens are ranked before it is known that a row needs more.
MAX_NUM_RANKED_FIRST = 256


def draw_plain(blocked: Tensor, row_maxima: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw from the whole distribution at each row's temperature.

    Args:
        blocked: [n, N * 64] float32, not changed.
        row_maxima: [n, 1] float32, finite.
        batch: n rows without filters.

    Returns:
        [n] int64 token ids, on the device of the logits.
    """
    return draw_by_token_id(blocked, row_maxima, batch.temperature, batch.uniform)


def draw_filtered(blocked: Tensor, maxima: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw from what top_k, top_p, min_p and typical_p leave of each row.

    On the CPU the filters first see the few tokens that will do for most rows; a row that needs
    more is done by itself. On another device to look at values is to wait for it: there all tokens
    are ranked, or as many as the largest top_k if every row has one. All ways give the same
    token, since a ranked part is always the beginning of the same order and sums are exact.

    Args:
        blocked: [n, N * 64] float32, not changed.
        maxima: [n, N] float32, its block maxima.
        batch: n rows, each with at least one filter.

    Returns:
        [n] int64 token ids, on the device of the logits. Of a row without a finite maximum the id
        means nothing.
    """
    row_maxima = maxima.amax(dim=1, keepdim=True)
    totals = _totals(blocked, row_maxima, batch)
    if blocked.is_cpu:
        return _draw_looking(blocked, maxima, row_maxima, batch, totals)
    return draw_without_looking(blocked, maxima, row_maxima, batch, totals)


def draw_without_looking(
    blocked: Tensor, maxima: Tensor, row_maxima: Tensor, batch: SamplingBatch, totals: Tensor
) -> Tensor:
    """Draw with shapes that depend on parameters only; arguments as those of count_kept."""
    num_best = max(each.top_k if each.top_k > 0 else blocked.shape[1] for each in batch.params)
    ranked = rank_best(blocked, maxima, num_best)
    return _draw_kept(ranked, count_kept(ranked, row_maxima, batch, totals), batch)


def _draw_looking(
    blocked: Tensor, maxima: Tensor, row_maxima: Tensor, batch: SamplingBatch, totals: Tensor
) -> Tensor:
    largest_top_k = max(each.top_k for each in batch.params)
    best = best_maxima(maxima, max(MAX_NUM_RANKED_FIRST, largest_top_k))
    num_wanted = _num_wanted(best[:, :MAX_NUM_RANKED_FIRST], row_maxima, batch, totals)
    ranked = rank_leading(blocked, maxima, best, num_wanted)
    kept = count_kept(ranked, row_maxima, batch, totals)
    tokens = _draw_kept(ranked, kept, batch)
    is_undecided = ~kept.is_decided & row_maxima[:, 0].isfinite()
    for index in is_undecided.nonzero()[:, 0].tolist():
        tokens[index] = _draw_alone(
            blocked[index],
            row_maxima[index : index + 1],
            batch.select(index),
            totals[index : index + 1],
        )
    return tokens


def _totals(blocked: Tensor, row_maxima: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the weight of whole rows, [n] float64; 0 where no filter reads it."""
    indices = [
        index
        for index, params in enumerate(batch.params)
        if params.top_p < 1.0 and params.top_k <= 0
    ]
    if not indices:
        return torch.zeros(len(blocked), dtype=torch.float64, device=blocked.device)
    mass = cumulative_mass(
        take_rows(blocked, indices),
        take_rows(row_maxima, indices),
        take_rows(batch.temperature, indices),
    )[:, -1]
    if len(indices) == len(blocked):
        return mass
    totals = torch.zeros(len(blocked), dtype=torch.float64, device=blocked.device)
    return totals.index_copy_(0, send(integers(indices), blocked.device), mass)


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


def _draw_alone(row: Tensor, row_maximum: Tensor, batch: SamplingBatch, total: Tensor) -> Tensor:
    """Draw for one row ([N * 64] float32, on the CPU) from all tokens its filters could keep.

    Returns:
        [] int64.
    """
    (params,) = batch.params
    if params.top_k > 0:
        num_best = min(params.top_k, len(row))
        is_possible = row >= row.topk(num_best, sorted=False).values.amin()
    else:
        scaled = scaled_logits(row, row_maximum[0], batch.temperature[0])
        if params.typical_p == 1.0:
            return draw_wide(row, scaled, batch, float(total))
        is_possible = scaled >= kept_bound(scaled, batch, float(total))
    ranked = rank_chosen(row, is_possible)
    return _draw_kept(ranked, count_kept(ranked, row_maximum, batch, total), batch)[0]


def _draw_kept(ranked: RankedTokens, kept: KeptTokens, batch: SamplingBatch) -> Tensor:
    """Invert the cumulative weights of the kept tokens in order of rank: [n] int64."""
    places = torch.arange(kept.weights.shape[1], device=kept.weights.device)
    weights = torch.where(places < kept.num_kept[:, None], kept.weights, 0.0)
    typical = [index for index, params in enumerate(batch.params) if params.typical_p < 1.0]
    if typical:
        found = typical_weights(take_rows(weights, typical), take_rows(batch.typical_p, typical))
        weights.index_copy_(0, send(integers(typical), weights.device), found)
    cumulative = weights.cumsum(dim=1)
    ranks = invert_cumulative(cumulative, batch.uniform * cumulative[:, -1])
    return ranked.token_ids.gather(1, ranks[:, None])[:, 0]
