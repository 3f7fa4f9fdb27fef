"""AdapterStore: the tensors of resident adapters, in slots. Holds no policy: AdapterLedger does."""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from models.adapters.ledger import AdapterCost, Slot, bucket_rank_for
from models.adapters.own_tables import OwnTables, cost_bytes
from models.adapters.virtual_tokens import VirtualTokens
from models.adapters.weights import AdapterWeights, ModuleDelta, ModuleShape


@dataclasses.dataclass(frozen=True, slots=True)
class LoraSlots:
    """Low-rank pairs of one module for all slots of one bucket of ranks.

    Attributes:
        a: [S, K, R]; a row x of slot s gets ``x @ a[s] @ b[s]``.
        b: [S, R, N].
    """

    a: Tensor
    b: Tensor


class _VectorSlots:
    """One vector per slot of one module; made when the first adapter needs it.

    Attributes:
        values: [S, width] float32; only the users' rows mean anything.
        users: slots whose adapter has such a vector here.
    """

    __slots__ = ("users", "values")

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        self.values = torch.empty(num_slots, width, dtype=torch.float32, device=device)
        self.users: set[int] = set()

    def write_(self, slot: int, value: Tensor | None) -> None:
        if value is None:
            self.users.discard(slot)
            return
        self.values[slot] = value
        self.users.add(slot)


class _Bucket:
    """All modules' tensors for the slots of one bucket of ranks."""

    __slots__ = ("lora", "lora_users", "rotations", "vectors")

    def __init__(self) -> None:
        self.lora: dict[int, LoraSlots] = {}
        self.lora_users: dict[int, set[int]] = {}
        self.vectors: dict[tuple[str, int], _VectorSlots] = {}
        # By module and slot. Blocks differ in size, so each adapter has its own tensor, which
        # goes with it.
        self.rotations: dict[int, dict[int, Tensor]] = {}


# Fields of ModuleDelta that hold one number per input or output.
OUTPUT_GAIN, INPUT_GAIN, BIAS = "output_gain", "input_gain", "bias"
_VECTORS = (OUTPUT_GAIN, INPUT_GAIN, BIAS)


class AdapterStore:
    """Slots of tensors, per bucket of ranks and module.

    Ranks below the bucket's are padded with zeros, which changes no bit of a row's result. Slots
    whose tenants do not change a module cost no memory for it on the CPU: the system gives pages
    when they are first written.

    Owner: the step thread.

    Invariants: what a slot holds outside of its tenant's own matrices is zero, so nothing of a
    former tenant is left.
    """

    def __init__(
        self,
        modules: Sequence[ModuleShape],
        num_slots: int,
        bucket_ranks: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make a store without residents.

        Args:
            modules: what adapters may change; their places in it are the module indices.
            num_slots: slots of each bucket.
            bucket_ranks: rising.
            dtype: of the matrices: that of the model's matrix products.
            device: where they lie.
        """
        self.modules = tuple(modules)
        self.dtype = dtype
        self.bucket_ranks = tuple(bucket_ranks)
        self.device = device
        self._num_slots = num_slots
        self._buckets: dict[int, _Bucket] = {}
        # As the file has them, not in ``dtype``: no products are made of them.
        self._virtual_tokens: dict[Slot, VirtualTokens] = {}
        self.own_tables = OwnTables(device)
        # By module: the slots whose tenants change it.
        self._changers: dict[int, set[Slot]] = {}

    def cost(self, weights: AdapterWeights) -> AdapterCost:
        """Return what an adapter takes in a slot of its bucket."""
        bucket_rank = bucket_rank_for(weights.rank, self.bucket_ranks)
        shapes = {module.name: module for module in self.modules}
        num_bytes = 0 if weights.virtual_tokens is None else weights.virtual_tokens.num_bytes
        for name, delta in weights.modules.items():
            module = shapes[name]
            if delta.lora_a is not None:
                width = module.num_inputs + module.num_outputs
                num_bytes += bucket_rank * width * self.dtype.itemsize
            vectors = (delta.bias, delta.output_gain, delta.input_gain, delta.input_rotation)
            num_bytes += sum(4 * vector.numel() for vector in vectors if vector is not None)
            num_bytes += cost_bytes(module, delta)
        return AdapterCost(weights.rank, num_bytes)

    def write_(self, slot: Slot, weights: AdapterWeights) -> None:
        """Fill a slot; whatever its former tenant left is gone.

        Args:
            slot: its bucket holds the largest of the adapter's ranks.
            weights: of the new tenant; every module it names is one of the store's.
        """
        bucket = self._buckets.setdefault(slot.bucket_rank, _Bucket())
        self._virtual_tokens.pop(slot, None)
        if weights.virtual_tokens is not None:
            self._virtual_tokens[slot] = weights.virtual_tokens.to(self.device)
        self.own_tables.begin_(slot, weights.num_added_tokens)
        for number, module in enumerate(self.modules):
            delta = weights.modules.get(module.name)
            changers = self._changers.setdefault(number, set())
            changers.discard(slot) if delta is None else changers.add(slot)
            self.own_tables.write_(slot, number, module, delta)
            self._write_lora_(bucket, number, slot, delta)
            for field in _VECTORS:
                value = None if delta is None else getattr(delta, field)
                self._write_vector_(bucket, field, number, slot.index, value)
            self._write_rotation_(bucket, number, slot.index, delta)

    def clear_(self, slot: Slot) -> None:
        """Free what a slot's tenant has for itself; what all slots share is written over later.

        Args:
            slot: no row uses it before it is written again.
        """
        self._virtual_tokens.pop(slot, None)
        bucket = self._buckets.get(slot.bucket_rank)
        if bucket is None:
            return
        self.own_tables.begin_(slot, 0)
        for number, module in enumerate(self.modules):
            self.own_tables.write_(slot, number, module, None)
            self._write_rotation_(bucket, number, slot.index, None)
            self._changers.setdefault(number, set()).discard(slot)

    def is_changed(self, module: int) -> bool:
        """Tell whether the tenant of any slot changes a module."""
        return bool(self._changers.get(module))

    def virtual_tokens(self, slot: Slot) -> VirtualTokens | None:
        """Return what stands before every prompt of a slot's tenant; None is nothing."""
        return self._virtual_tokens.get(slot)

    def lora(self, bucket_rank: int, module: int, slots: frozenset[int]) -> LoraSlots | None:
        """Return the pairs of a module, None if none of ``slots`` has one there."""
        bucket = self._buckets[bucket_rank]
        users = bucket.lora_users.get(module)
        return bucket.lora[module] if users and not users.isdisjoint(slots) else None

    def vectors(
        self, field: str, bucket_rank: int, module: int, slots: frozenset[int]
    ) -> tuple[Tensor, frozenset[int]] | None:
        """Return the vectors of a module and which of ``slots`` have one; None if none has."""
        found = self._buckets[bucket_rank].vectors.get((field, module))
        if found is None or not (users := slots & found.users):
            return None
        return found.values, users

    def rotations(self, bucket_rank: int, module: int) -> Mapping[int, Tensor]:
        """Return the rotations of a module's input, by slot.

        Each is [num_blocks, b, b] float32, or [1, b, b] for all blocks of that size alike.
        """
        return self._buckets[bucket_rank].rotations.get(module, {})

    def _write_lora_(
        self, bucket: _Bucket, number: int, slot: Slot, delta: ModuleDelta | None
    ) -> None:
        users = bucket.lora_users.setdefault(number, set())
        pair = bucket.lora.get(number)
        if delta is None or delta.lora_a is None or delta.lora_b is None:
            if pair is not None and slot.index in users:
                users.discard(slot.index)
                pair.a[slot.index] = 0
                pair.b[slot.index] = 0
            return
        if pair is None:
            module = self.modules[number]
            pair = bucket.lora[number] = LoraSlots(
                self._zeros(module.num_inputs, slot.bucket_rank),
                self._zeros(slot.bucket_rank, module.num_outputs),
            )
        rank = delta.lora_a.shape[0]
        a, b = pair.a[slot.index], pair.b[slot.index]
        if rank < slot.bucket_rank:
            a[:, rank:] = 0
            b[rank:] = 0
            a, b = a[:, :rank], b[:rank]
        a.copy_(delta.lora_a.t())
        b.copy_(delta.lora_b.t())
        users.add(slot.index)

    def _zeros(self, *shape: int) -> Tensor:
        """Return zeros [S, ...] for all slots; on the CPU no memory is taken before it is written.

        A table of tokens has megabytes a slot, and most slots' adapters do not change it.
        """
        shape = (self._num_slots, *shape)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        pages = mmap.mmap(-1, math.prod(shape) * self.dtype.itemsize)
        return torch.frombuffer(pages, dtype=self.dtype).view(shape)

    def _write_vector_(
        self, bucket: _Bucket, field: str, number: int, index: int, value: Tensor | None
    ) -> None:
        found = bucket.vectors.get((field, number))
        if found is None:
            if value is None:
                return
            found = _VectorSlots(self._num_slots, value.shape[0], self.device)
            bucket.vectors[field, number] = found
        found.write_(index, value)

    def _write_rotation_(
        self, bucket: _Bucket, number: int, index: int, delta: ModuleDelta | None
    ) -> None:
        by_slot = bucket.rotations.get(number, {})
        by_slot.pop(index, None)
        if delta is not None and delta.input_rotation is not None:
            rotation = delta.input_rotation.to(self.device, copy=True)
            bucket.rotations.setdefault(number, by_slot)[index] = rotation
