"""BlockManager: who holds which KV block. Knows sequences as numbers only and holds no tensors."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from models.kv_cache.prefix_index import ChainNamespace, PrefixChain, PrefixIndex


@dataclasses.dataclass(slots=True)
class _Holding:
    """What one sequence holds.

    Attributes:
        chain: keys of its full blocks.
        block_ids: its block table; only ever grows.
        num_recorded_blocks: leading blocks that are full and have been offered to the index.
    """

    chain: PrefixChain
    block_ids: tuple[int, ...]
    num_recorded_blocks: int


class BlockManager:
    """Ledger of KV blocks: ids, reference counts, block tables per seq_id, prefix chains.

    A block table only grows between ``try_allocate`` and ``free``. A block that two sequences
    compute at the same time is not merged: the first one to be recorded is findable, the other
    stays private to its sequence, so no table changes under a running sequence.

    Owner: step thread.
    Invariants: every block is exactly one of free, evictable (findable, unreferenced) or
    referenced; a reference count equals the number of tables that hold the block.
    """

    def __init__(
        self, num_blocks: int, block_size_tokens: int, *, is_prefix_caching_enabled: bool = True
    ) -> None:
        """Start with every block free.

        Args:
            num_blocks: blocks of the pool; ids are [0, num_blocks).
            block_size_tokens: tokens of one block.
            is_prefix_caching_enabled: keep findable blocks that nobody references. If not, blocks
                are findable only while a sequence holds them.
        """
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.is_prefix_caching_enabled = is_prefix_caching_enabled
        # used as a stack: what was freed last is likeliest to be in a processor cache still
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_references = [0] * num_blocks
        self._index = PrefixIndex()
        self._holdings: dict[int, _Holding] = {}
        # whom the last refused allocation was for, so that the next try need not hash again
        self._refused_seq_id: int | None = None
        self._refused_chain: PrefixChain | None = None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had: free ones and evictable ones."""
        return len(self._free) + self._index.num_evictable

    @property
    def num_cached_blocks(self) -> int:
        """Findable blocks, referenced or not."""
        return len(self._index)

    @property
    def num_holders(self) -> int:
        """Sequences that hold a block table."""
        return len(self._holdings)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def match_prefix(self, namespace: ChainNamespace, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens have findable KV; takes nothing.

        A multiple of the block size that leaves at least one token to be computed.
        """
        chain = PrefixChain(namespace, self.block_size_tokens)
        found = self._index.find(chain, token_ids, self._max_num_matched_blocks(token_ids))
        return len(found) * self.block_size_tokens

    def try_allocate(
        self,
        seq_id: int,
        namespace: ChainNamespace,
        token_ids: Sequence[int],
        num_tokens_to_cover: int,
        *,
        num_blocks_to_spare: int = 0,
    ) -> int | None:
        """Give a new sequence the findable beginning of its tokens and new blocks for the rest.

        Args:
            seq_id: must hold nothing yet.
            namespace: where to look for KV that others computed.
            token_ids: the sequence's tokens; over its whole life they may only grow.
            num_tokens_to_cover: the block table will cover positions [0, num_tokens_to_cover).
            num_blocks_to_spare: refuse unless so many blocks can still be had afterwards.

        Returns:
            How many leading tokens have KV already (always fewer than ``len(token_ids)``), or
            None if there is no room; then no block has changed hands.
        """
        if seq_id in self._holdings:
            raise RuntimeError(f"sequence {seq_id} holds blocks already")
        chain = self._refused_chain if self._refused_seq_id == seq_id else None
        if chain is None:
            chain = PrefixChain(namespace, self.block_size_tokens)
        found = self._index.find(chain, token_ids, self._max_num_matched_blocks(token_ids))
        num_new = max(self.num_blocks_for(num_tokens_to_cover) - len(found), 0)
        num_reclaimed = sum(self._num_references[block_id] == 0 for block_id in found)
        if num_new + num_reclaimed + num_blocks_to_spare > self.num_free_blocks:
            self._refused_seq_id, self._refused_chain = seq_id, chain
            return None
        # found blocks first: taking a new one may evict whatever is still unreferenced
        for block_id in found:
            if self._num_references[block_id] == 0:
                self._index.reference(block_id)
            self._num_references[block_id] += 1
        self._holdings[seq_id] = _Holding(
            chain, (*found, *self._take(num_new)), num_recorded_blocks=len(found)
        )
        return len(found) * self.block_size_tokens

    def try_extend(self, seq_id: int, num_tokens_to_cover: int) -> bool:
        """Lengthen a block table until it covers [0, num_tokens_to_cover).

        Returns:
            False if there is no room; then nothing has changed.
        """
        holding = self._holdings[seq_id]
        num_new = -(-num_tokens_to_cover // self.block_size_tokens) - len(holding.block_ids)
        if num_new <= 0:
            return True
        if num_new > self.num_free_blocks:
            return False
        holding.block_ids = (*holding.block_ids, *self._take(num_new))
        return True

    def record_computed(
        self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int
    ) -> None:
        """Make blocks findable whose every position is in [0, num_computed_tokens).

        Call it after the step that computed them. Costs O(blocks that became full).

        Args:
            seq_id: who computed.
            token_ids: the sequence's tokens, at least ``num_computed_tokens`` of them.
            num_computed_tokens: positions whose KV is in the blocks.
        """
        holding = self._holdings[seq_id]
        num_full = num_computed_tokens // self.block_size_tokens
        for position in range(holding.num_recorded_blocks, num_full):
            key = holding.chain.key(position, token_ids)
            parent_key = holding.chain.parent_key(position)
            self._index.add(key, parent_key, holding.block_ids[position])
            holding.num_recorded_blocks = position + 1

    def free(self, seq_id: int, *, is_content_valid: bool = True) -> None:
        """Drop all that a sequence holds; no effect if it holds nothing.

        Args:
            seq_id: whose.
            is_content_valid: False makes its blocks unfindable, so that nobody meets the KV of a
                computation that went wrong.
        """
        holding = self._holdings.pop(seq_id, None)
        if holding is None:
            return
        # deepest first: that is the order of eviction
        for position in range(len(holding.block_ids) - 1, -1, -1):
            block_id = holding.block_ids[position]
            if not is_content_valid:
                self._index.remove(block_id)
            self._release(block_id)
            if position < holding.num_recorded_blocks:
                # If another block is found under this key, it is as recent as what extends it.
                self._index.touch(holding.chain.parent_key(position + 1))

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        """Return the blocks of a sequence, first positions first."""
        return self._holdings[seq_id].block_ids

    def check_invariants(self) -> None:
        """Check the whole ledger.

        Raises:
            RuntimeError: what is wrong with it.
        """
        held = collections.Counter(
            block_id for holding in self._holdings.values() for block_id in holding.block_ids
        )
        free = collections.Counter(self._free)
        for block_id in range(self.num_blocks):
            if self._num_references[block_id] != held[block_id]:
                raise RuntimeError(f"block {block_id} has a wrong reference count")
            states = free[block_id] + self._index.is_evictable(block_id) + (held[block_id] > 0)
            if states != 1:
                raise RuntimeError(f"block {block_id} is in {states} states at once")
            if block_id in self._index and free[block_id]:
                raise RuntimeError(f"block {block_id} is findable and free")
        if not held.keys() | free.keys() | set(self._index) <= set(range(self.num_blocks)):
            raise RuntimeError("a block id is outside of the pool")
        for seq_id, holding in self._holdings.items():
            if len(set(holding.block_ids)) != len(holding.block_ids):
                raise RuntimeError(f"sequence {seq_id} holds a block twice")
        if self._index.num_evictable and not self.is_prefix_caching_enabled:
            raise RuntimeError("unreferenced blocks are kept although prefix caching is off")
        self._index.check_invariants()

    def _max_num_matched_blocks(self, token_ids: Sequence[int]) -> int:
        return (len(token_ids) - 1) // self.block_size_tokens

    def _take(self, num_blocks: int) -> list[int]:
        taken: list[int] = []
        for _ in range(num_blocks):
            block_id = self._free.pop() if self._free else self._index.evict()
            self._num_references[block_id] = 1
            taken.append(block_id)
        return taken

    def _release(self, block_id: int) -> None:
        self._num_references[block_id] -= 1
        if self._num_references[block_id] > 0:
            return
        if self.is_prefix_caching_enabled and block_id in self._index:
            self._index.release(block_id)
            return
        self._index.remove(block_id)
        self._free.append(block_id)
