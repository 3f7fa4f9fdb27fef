"""In which dtype matrices are multiplied, which is not always the dtype that they are stored in."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_HALF_DTYPES = (torch.bfloat16, torch.float16)
# As torch names them; any one of them multiplies bfloat16 matrices.
_BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "bf16")


def matrix_unit(capabilities: Mapping[str, object] | None = None) -> str:
    """Name what multiplies bfloat16 matrices on this processor, "vector" if nothing does.

    Args:
        capabilities: of the processor; those of the one at hand by default.
    """
    found = torch.cpu.get_capabilities() if capabilities is None else capabilities
    return next((unit for unit in _BFLOAT16_UNITS if found.get(unit)), "vector")


def product_dtype(
    dtype: torch.dtype,
    device: torch.device,
    capabilities: Mapping[str, object] | None = None,
) -> torch.dtype:
    """Return the dtype of the operands of matrix products in a model of ``dtype``.

    It is ``dtype``, but for half precision on a processor that cannot multiply it: there a product
    in float32, rounded afterwards, is up to nine times as fast, and loses nothing. A rule and no
    measurement of speed, so that equal machines choose alike and give the same bits.

    Args:
        dtype: of weights and activations.
        device: where they lie.
        capabilities: of the processor; those of the one at hand by default.
    """
    is_slow = device.type == "cpu" and dtype in _HALF_DTYPES
    return torch.float32 if is_slow and matrix_unit(capabilities) == "vector" else dtype
