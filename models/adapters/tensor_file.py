"""The bytes of a safetensors file, of which nothing is believed before it is checked."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, TypeGuard

import safetensors
import safetensors.torch
from torch import Tensor

from models.adapters.faults import AdapterFaultError, shown

MAX_HEADER_BYTES = 8 << 20

_PREFIX_BYTES = 8
_MAX_DIMENSIONS = 4
_MAX_DIMENSION = 1 << 32
_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """What the header says of one tensor: its shape and its bytes in the file."""

    shape: tuple[int, ...]
    num_bytes: int


class TensorFile:
    """A file whose header is read, its tensors not yet.

    Attributes:
        tensors: what the header says of all tensors in the file, by name.
    """

    def __init__(self, encoded: bytes) -> None:
        """Read the header.

        Raises:
            AdapterFaultError: it is damaged, or contradicts the file's size.
        """
        self._encoded = encoded
        self.tensors = _read_header(encoded)

    def load(self) -> dict[str, Tensor]:
        """Return copies of all tensors in their stored dtypes, on the host.

        Raises:
            AdapterFaultError: the places of the tensors in the file make no sense.
        """
        try:
            tensors: dict[str, Tensor] = safetensors.torch.load(self._encoded)
        except safetensors.SafetensorError as error:
            raise AdapterFaultError(f"its weights are damaged: {shown(str(error))}") from error
        return tensors


def _read_header(encoded: bytes) -> Mapping[str, StoredTensor]:
    prefix = encoded[:_PREFIX_BYTES]
    (num_header_bytes,) = struct.unpack("<Q", prefix) if len(prefix) == _PREFIX_BYTES else (0,)
    if not 0 < num_header_bytes <= min(MAX_HEADER_BYTES, len(encoded)):
        raise AdapterFaultError(
            "its weights are no safetensors file (perhaps an unfetched Git LFS link)"
        )
    try:
        header = json.loads(
            encoded[_PREFIX_BYTES : _PREFIX_BYTES + num_header_bytes], object_pairs_hook=_unique
        )
    except (ValueError, RecursionError) as error:
        raise AdapterFaultError("its weights have a damaged header") from error
    if not isinstance(header, dict):
        raise AdapterFaultError("its weights have a damaged header")
    header.pop("__metadata__", None)
    tensors = {name: _stored_tensor(name, entry) for name, entry in header.items()}
    num_tensor_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    num_expected_bytes = _PREFIX_BYTES + num_header_bytes + num_tensor_bytes
    if len(encoded) != num_expected_bytes:
        raise AdapterFaultError(
            f"its weights are {len(encoded)} bytes long, but the header tells of "
            f"{num_expected_bytes}"
        )
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of JSON's pairs; of two with one name, another reader may take the other."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a name is there twice")
    return mapping


def _stored_tensor(name: str, entry: Any) -> StoredTensor:
    kind = entry.get("dtype") if isinstance(entry, dict) else None
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or not _is_shape(shape):
        raise AdapterFaultError("its weights have a damaged header")
    if kind not in _FLOAT_BYTES:
        raise AdapterFaultError(
            f"the tensor '{shown(name)}' is stored as {shown(kind)}; "
            f"it must be one of {', '.join(_FLOAT_BYTES)}"
        )
    return StoredTensor(tuple(shape), math.prod(shape) * _FLOAT_BYTES[kind])


def _is_shape(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size <= _MAX_DIMENSION for size in value)
    )
