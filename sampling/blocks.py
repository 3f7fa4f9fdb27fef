"""A vocabulary cut into blocks: maxima, sums and inverse CDF that no neighbour can change.

A reduction over a whole row may be split among threads when the batch is small, which changes
its last bits. Here a device only reduces blocks of 64, each by itself; the few hundred results
of a row are added up in order, in float64, on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_SIZE_TOKENS = 64


def to_blocked(logits: Tensor) -> Tensor:
    """Return logits as float32 whose width is a multiple of the block size.

    Args:
        logits: [B, V], any floating dtype.

    Returns:
        [B, N * 64] float32, contiguous, -inf behind V. Shares memory with ``logits`` only if
        those are of this form already.
    """
    padding = -logits.shape[1] % BLOCK_SIZE_TOKENS
    blocked = logits.to(torch.float32).contiguous()
    if padding:
        return torch.nn.functional.pad(blocked, (0, padding), value=-math.inf)
    return blocked


def block_maxima(blocked: Tensor) -> Tensor:
    """Return the maximum of each block: [B, N * 64] -> [B, N]. NaN wins."""
    return blocked.view(len(blocked), -1, BLOCK_SIZE_TOKENS).amax(dim=2)


def first_argmax(blocked: Tensor, maxima: Tensor) -> Tensor:
    """Return each row's best token id, the lowest of equals.

    Args:
        blocked: [B, N * 64].
        maxima: [B, N], its block maxima.

    Returns:
        [B] int64.
    """
    block_ids = maxima.argmax(dim=1)
    best_blocks = _chosen_blocks(blocked, block_ids)
    return block_ids * BLOCK_SIZE_TOKENS + best_blocks.argmax(dim=1)


def block_weights(blocked: Tensor, row_maxima: Tensor, temperature: Tensor) -> Tensor:
    """Return exp((logit - maximum) / temperature), element by element, float32.

    The maximum is taken off first, so that a tiny temperature gives 0 and 1, never NaN.

    Args:
        blocked: [B, N * 64] float32.
        row_maxima: [B, 1] float32, finite.
        temperature: [B, 1] float32, above 0.
    """
    return blocked.sub(row_maxima).div_(temperature).exp_()


def cumulative_block_mass(weights: Tensor) -> Tensor:
    """Return the running sum over blocks: [B, N * 64] float32 -> [B, N] float64, on the host."""
    sums = weights.view(len(weights), -1, BLOCK_SIZE_TOKENS).sum(dim=2)
    return sums.cpu().to(torch.float64).cumsum(dim=1)


def draw_by_token_id(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the token ids at which the cumulative weights, in order of ids, pass ``uniform``.

    Args:
        weights: [B, N * 64] float32, not negative, at least one above 0 per row.
        uniform: [B] float64 in [0, 1), on the host.

    Returns:
        [B] int64, on the host.
    """
    cumulative = cumulative_block_mass(weights)
    target = uniform * cumulative[:, -1]
    block_ids = invert_cumulative(cumulative, target)
    mass_before = torch.where(
        block_ids > 0, cumulative.gather(1, (block_ids - 1).clamp(min=0)[:, None])[:, 0], 0.0
    )
    blocks = _chosen_blocks(weights, block_ids.to(weights.device)).cpu()
    inside = blocks.to(torch.float64).cumsum(dim=1)
    offsets = invert_cumulative(inside, target - mass_before)
    return block_ids * BLOCK_SIZE_TOKENS + offsets


def invert_cumulative(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first index whose cumulative weight is above ``target``.

    A target that rounding has pushed to the total or beyond gives the last index that has a
    weight at all: an index without weight is never returned.

    Args:
        cumulative: [B, W] float64, not falling, the last column above 0.
        target: [B] float64, not negative.

    Returns:
        [B] int64.
    """
    passed = (cumulative <= target[:, None]).sum(dim=1)
    last_with_weight = (cumulative < cumulative[:, -1:]).sum(dim=1)
    return torch.minimum(passed, last_with_weight)


def take_rows(tensor: Tensor, indices: Sequence[int]) -> Tensor:
    """Return the rows at ``indices`` (rising, distinct): the tensor itself if that is all."""
    if len(indices) == tensor.shape[0]:
        return tensor
    return tensor[torch.tensor(indices, device=tensor.device)]


def _chosen_blocks(blocked: Tensor, block_ids: Tensor) -> Tensor:
    blocks = blocked.view(len(blocked), -1, BLOCK_SIZE_TOKENS)
    return blocks[torch.arange(blocked.shape[0], device=blocked.device), block_ids]
