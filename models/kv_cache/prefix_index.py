"""Prefix index: which block holds the KV of which beginning of text. Counts no references."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import struct
from collections.abc import Iterator, Sequence

from models.requests import PrefixNamespace

_KEY_SIZE_BYTES = 32
# Two purposes of one hash function: a root can never equal the key of a block.
_ROOT_PURPOSE = b"medley root"
_BLOCK_PURPOSE = b"medley block"


@dataclasses.dataclass(frozen=True, slots=True)
class GroupNamespace:
    """A namespace that only the choices of one request share (prefix caching switched off)."""

    request_id: str
    namespace: PrefixNamespace


ChainNamespace = PrefixNamespace | GroupNamespace


def root_key(namespace: ChainNamespace) -> bytes:
    """Return the key that every chain of the namespace starts from.

    Every field is written with its presence and its length before it, so that different
    namespaces are different bytes whatever a caller puts into an id or a salt, and absent (None)
    differs from every text.
    """
    request_id: str | None = None
    if isinstance(namespace, GroupNamespace):
        request_id, namespace = namespace.request_id, namespace.namespace
    adapter = namespace.adapter
    fields = (
        request_id,
        namespace.model_id,
        None if adapter is None else adapter.id,
        None if adapter is None else adapter.version,
        namespace.cache_salt,
    )
    encoded = b"".join(_encode_field(field) for field in fields)
    return hashlib.blake2b(encoded, digest_size=_KEY_SIZE_BYTES, person=_ROOT_PURPOSE).digest()


def _encode_field(field: str | None) -> bytes:
    if field is None:
        return b"\x00"
    # JSON can carry lone surrogates into a salt; they must be neither an error nor lost.
    text = field.encode("utf-8", "surrogatepass")
    return b"\x01" + len(text).to_bytes(8, "little") + text


class PrefixChain:
    """Keys of the full blocks of one text that only grows; every block is hashed once.

    The key of block i covers all tokens of [0, (i + 1) * block size) and the namespace: equal
    keys mean equal KV (a 256-bit hash over fixed-width token ids, chained).
    """

    __slots__ = ("_block_size_tokens", "_keys", "_pack")

    def __init__(self, namespace: ChainNamespace, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._pack = struct.Struct(f"<{block_size_tokens}q").pack
        # _keys[i] is the key before block i, so _keys[0] is the root
        self._keys = [root_key(namespace)]

    def parent_key(self, index: int) -> bytes:
        """Return the key before block ``index``, whose own key has been asked for."""
        return self._keys[index]

    def key(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Return the key of block ``index``, all of whose tokens are in ``token_ids``."""
        keys = self._keys
        size = self._block_size_tokens
        while len(keys) <= index + 1:
            begin = (len(keys) - 1) * size
            content = keys[-1] + self._pack(*token_ids[begin : begin + size])
            keys.append(
                hashlib.blake2b(
                    content, digest_size=_KEY_SIZE_BYTES, person=_BLOCK_PURPOSE
                ).digest()
            )
        return keys[index + 1]


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    key: bytes
    parent_key: bytes


class PrefixIndex:
    """Findable blocks by chain key, and the order in which the unreferenced ones are evicted.

    Least recently used first; of one chain the deepest block first, so that no prefix is evicted
    before an extension of it that could be evicted instead.

    Owner: step thread (through BlockManager).
    Invariants: one block per key and one key per block; evictable blocks are findable; of two
    evictable neighbours in a chain the deeper one is evicted first.
    """

    def __init__(self) -> None:
        self._block_by_key: dict[bytes, int] = {}
        self._entry_by_block: dict[int, _Entry] = {}
        # least recently used first
        self._evictable: collections.OrderedDict[int, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._block_by_key)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entry_by_block

    def __iter__(self) -> Iterator[int]:
        return iter(self._entry_by_block)

    @property
    def num_evictable(self) -> int:
        """Findable blocks that nobody references."""
        return len(self._evictable)

    def is_evictable(self, block_id: int) -> bool:
        """Return whether the block is findable and unreferenced."""
        return block_id in self._evictable

    def find(self, chain: PrefixChain, token_ids: Sequence[int], max_num_blocks: int) -> list[int]:
        """Return the blocks of the longest findable beginning, at most ``max_num_blocks``."""
        found: list[int] = []
        for index in range(max_num_blocks):
            block_id = self._block_by_key.get(chain.key(index, token_ids))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def add(self, key: bytes, parent_key: bytes, block_id: int) -> None:
        """Make a referenced block findable, unless another block holds the same KV already."""
        if key not in self._block_by_key:
            self._block_by_key[key] = block_id
            self._entry_by_block[block_id] = _Entry(key, parent_key)

    def remove(self, block_id: int) -> None:
        """Make a block unfindable; no effect if it is not findable."""
        entry = self._entry_by_block.pop(block_id, None)
        if entry is not None:
            del self._block_by_key[entry.key]
            self._evictable.pop(block_id, None)

    def reference(self, block_id: int) -> None:
        """Note that an evictable block is referenced again."""
        del self._evictable[block_id]

    def release(self, block_id: int) -> None:
        """Note that a findable block lost its last reference: it is the last one to be evicted."""
        self._evictable[block_id] = None

    def touch(self, key: bytes) -> None:
        """Note the use of whatever block is found under ``key``, if it is evictable."""
        block_id = self._block_by_key.get(key)
        if block_id is not None and block_id in self._evictable:
            self._evictable.move_to_end(block_id)

    def evict(self) -> int:
        """Make the block that is first in turn unfindable and return it."""
        block_id = next(iter(self._evictable))
        self.remove(block_id)
        return block_id

    def check_invariants(self) -> None:
        """Raise RuntimeError if the maps or the order of eviction disagree."""
        by_key = {entry.key: block for block, entry in self._entry_by_block.items()}
        if by_key != self._block_by_key:
            raise RuntimeError("keys and blocks of the prefix index disagree")
        turn = {block_id: position for position, block_id in enumerate(self._evictable)}
        for block_id, position in turn.items():
            entry = self._entry_by_block.get(block_id)
            if entry is None:
                raise RuntimeError(f"block {block_id} is evictable but not findable")
            parent = self._block_by_key.get(entry.parent_key)
            if parent is not None and turn.get(parent, len(turn)) < position:
                raise RuntimeError(f"block {parent} would be evicted before its extension")
