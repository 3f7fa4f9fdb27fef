"""Tokens in order of probability without sorting the vocabulary.

Order: higher logit first (before temperature, which could make unequal logits equal), lower token
id first among equals. Whatever is taken here is a leading part of that one order, so a result
that needs no more than this part does not depend on how long it is.

``rank_leading`` and ``rank_chosen`` look at values to read as few tokens as possible, which is free
on the CPU. ``rank_best`` never looks, so that a GPU need not be waited for.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from sampling.blocks import BLOCK_SIZE_TOKENS

# A row with more candidates than this would widen the arrays of its whole group.
MAX_NUM_CANDIDATES = 2048
# A vocabulary of at most this many tokens has too few blocks to choose from; all of it is ranked.
SMALL_VOCABULARY_SIZE = 1024
_LOWEST = torch.finfo(torch.float32).min
_NUM_ID_BITS = 32
_LARGEST_ID = 2**_NUM_ID_BITS - 1


@dataclasses.dataclass(frozen=True, slots=True)
class RankedTokens:
    """Leading tokens of n rows; row i has ``num_ranked[i]`` of them, the rest is padding.

    Attributes:
        token_ids: [n, W] int64.
        logits: [n, W] float32, falling; -inf is padding.
        num_ranked: [n] int64; 0 if the row had too many candidates to be ranked here.
        is_complete: [n] bool, whether no token that could matter is missing.
    """

    token_ids: Tensor
    logits: Tensor
    num_ranked: Tensor
    is_complete: Tensor


def best_maxima(maxima: Tensor, num_best: int) -> Tensor:
    """Return the best of each row's block maxima, falling: [n, N] -> [n, min(num_best, N)]."""
    return maxima.topk(min(num_best, maxima.shape[1]), dim=1).values


def rank_leading(blocked: Tensor, maxima: Tensor, best: Tensor, num_wanted: Tensor) -> RankedTokens:
    """Rank each row's best tokens, at least ``num_wanted`` of them if it has as many.

    The k best block maxima are k tokens, so the k-th of them is a bound that at least k tokens
    reach; only blocks that reach it are read. Masked tokens (-inf) are never ranked.

    Args:
        blocked: [n, N * 64] float32.
        maxima: [n, N] float32, its block maxima, on the host.
        best: [n, K] float32, the best of them, falling.
        num_wanted: [n] int64, at least 1, on the host; more than K counts as K.

    Returns:
        The tokens at or above the bound, more than asked for only as ties and chance have it (all
        of a small vocabulary). Nothing for a row with more than MAX_NUM_CANDIDATES.
    """
    if blocked.shape[1] <= SMALL_VOCABULARY_SIZE:
        bound = torch.full((len(maxima), 1), -math.inf)
    else:
        bound = best.gather(1, num_wanted.clamp(max=best.shape[1])[:, None] - 1)
    # A masked block among the k best: every block that is not masked has been counted.
    is_complete = bound[:, 0] == -math.inf
    bound = bound.clamp(min=_LOWEST)

    row_ids, block_ids = (maxima >= bound).nonzero(as_tuple=True)
    blocks = blocked.view(len(blocked), -1, BLOCK_SIZE_TOKENS)
    device = blocked.device
    values = blocks[row_ids.to(device), block_ids.to(device)].cpu()
    entries, offsets = (values >= bound[row_ids]).nonzero(as_tuple=True)
    return _rank(
        row_ids[entries],
        block_ids[entries] * BLOCK_SIZE_TOKENS + offsets,
        values[entries, offsets],
        is_complete,
    )


def rank_best(blocked: Tensor, maxima: Tensor, num_best: int) -> RankedTokens:
    """Rank each row's ``num_best`` best tokens; shapes depend on arguments only.

    The k best tokens are in the k blocks whose maxima come first in the same order: each of those
    maxima is a token that comes before all tokens of any other block. Where that leaves a small
    part of the vocabulary only this part is looked at.

    Args:
        blocked: [n, N * 64] float32.
        maxima: [n, N] float32, its block maxima, on the same device.
        num_best: at least 1.

    Returns:
        The tokens, complete in the sense that no token among the ``num_best`` best is missing.
        Masked tokens stand last and are not counted.
    """
    num_rows, width = blocked.shape
    num_best = min(num_best, width)
    if num_best * BLOCK_SIZE_TOKENS * 4 <= width:
        block_ids = _unpacked_ids(_packed_keys(maxima).topk(num_best, dim=1).values)
        blocks = blocked.view(num_rows, -1, BLOCK_SIZE_TOKENS)
        values = blocks.gather(1, block_ids[:, :, None].expand(-1, -1, BLOCK_SIZE_TOKENS))
        offsets = torch.arange(BLOCK_SIZE_TOKENS, device=blocked.device)
        token_ids = (block_ids[:, :, None] * BLOCK_SIZE_TOKENS + offsets).flatten(1)
        keys = _packed_keys(values.flatten(1), token_ids).topk(num_best, dim=1).values
        token_ids = _unpacked_ids(keys)
        logits = blocked.gather(1, token_ids)
    else:
        # Stands by token id, so a stable sort leaves ties in that order.
        order = blocked.sort(dim=1, descending=True, stable=True)
        token_ids, logits = order.indices[:, :num_best], order.values[:, :num_best]
    return RankedTokens(
        token_ids=token_ids,
        logits=logits,
        num_ranked=(logits >= _LOWEST).sum(dim=1),
        is_complete=torch.ones(num_rows, dtype=torch.bool, device=blocked.device),
    )


def _packed_keys(values: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return int64 keys, all different, that rise with the value and fall with the id.

    Args:
        values: [n, W] float32.
        ids: [n, W] int64 in [0, 2**32); None: the columns' numbers.
    """
    if ids is None:
        ids = torch.arange(values.shape[1], device=values.device)
    # Adding 0 makes one zero of the two. Bits of a float rise with it, of a negative one they fall.
    bits = values.add(0.0).view(torch.int32)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys: Tensor = (rising << _NUM_ID_BITS) + (_LARGEST_ID - ids)
    return keys


def _unpacked_ids(keys: Tensor) -> Tensor:
    ids: Tensor = _LARGEST_ID - (keys & _LARGEST_ID)
    return ids


def rank_chosen(logits: Tensor, is_chosen: Tensor) -> RankedTokens:
    """Rank the chosen tokens of one row and call it complete.

    Args:
        logits: [V] float32.
        is_chosen: [V] bool: a leading part of the row's order; masked tokens are left out.
    """
    token_ids = (is_chosen & (logits >= _LOWEST)).nonzero()[:, 0]
    order = logits[token_ids].sort(descending=True, stable=True)
    return RankedTokens(
        token_ids=token_ids[order.indices][None].cpu(),
        logits=order.values[None].cpu(),
        num_ranked=torch.tensor([len(token_ids)]),
        is_complete=torch.tensor([True]),
    )


def _rank(row_ids: Tensor, token_ids: Tensor, values: Tensor, is_complete: Tensor) -> RankedTokens:
    """Turn entries, sorted by row and then by token id, into padded rows and sort each."""
    num_rows = len(is_complete)
    counts = torch.bincount(row_ids, minlength=num_rows)
    is_ranked = counts <= MAX_NUM_CANDIDATES
    first_places = counts.cumsum(dim=0) - counts
    places = torch.arange(len(row_ids)) - first_places[row_ids]
    if not bool(is_ranked.all()):
        kept = is_ranked[row_ids]
        row_ids, token_ids, values, places = (
            each[kept] for each in (row_ids, token_ids, values, places)
        )
        counts = torch.where(is_ranked, counts, 0)

    width = max(int(counts.max()), 1)
    padded_values = torch.full((num_rows, width), -math.inf)
    padded_values[row_ids, places] = values
    padded_ids = torch.zeros((num_rows, width), dtype=torch.int64)
    padded_ids[row_ids, places] = token_ids
    # Entries stand by rising token id, so a stable sort leaves ties in that order.
    order = padded_values.sort(dim=1, descending=True, stable=True)
    return RankedTokens(
        token_ids=padded_ids.gather(1, order.indices),
        logits=order.values,
        num_ranked=counts,
        is_complete=is_complete & is_ranked,
    )
