"""Which backend attends: by device, by what the model's layers need, and by the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from models.attention import varlen
from models.attention.backend import AttentionBackend
from models.attention.matmul import MatmulAttention
from models.attention.reference import ReferenceAttention
from models.attention.varlen import TORCH_VARLEN, VarlenAttention, VarlenFunction
from models.config import AUTO, MATMUL, REFERENCE, VARLEN
from models.errors import ConfigError
from models.kv_cache.store import KVCachePool, LayerShape


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionChoice:
    """What a model will attend with.

    Attributes:
        name: MATMUL, VARLEN or REFERENCE.
        is_asked_for: by name; then no other takes its place.
        block_multiple_tokens: a KV block has a multiple of this number of tokens.
    """

    name: str
    is_asked_for: bool
    block_multiple_tokens: int

    def block_size_tokens(self, wanted: int) -> int:
        """Return the tokens of one KV block: ``wanted``, or the next multiple."""
        return -(-wanted // self.block_multiple_tokens) * self.block_multiple_tokens


def choose_attention(
    asked: str, model: PreTrainedModel, layers: Sequence[LayerShape], dtype: torch.dtype
) -> AttentionChoice:
    """Choose before any memory is taken for keys and values.

    On a CUDA device it is VARLEN for every model that it can serve, else MATMUL.

    Args:
        asked: one of ``models.config.ATTENTION_BACKENDS``.
        model: on its device.
        layers: shapes of keys and values.
        dtype: of keys and values.

    Raises:
        ConfigError: VARLEN was asked for and cannot serve this model here, with the reason.
    """
    name = asked
    if asked in (AUTO, VARLEN):
        obstacle = _varlen_obstacle(model, layers, dtype)
        if asked == VARLEN and obstacle is not None:
            raise ConfigError("attention_backend", f"'{VARLEN}' cannot run: {obstacle}")
        name = VARLEN if obstacle is None else MATMUL
    multiple = varlen.BLOCK_MULTIPLE_TOKENS if name == VARLEN else 1
    return AttentionChoice(name, asked != AUTO, multiple)


def make_attention(
    name: str,
    pool: KVCachePool,
    product_dtype: torch.dtype,
    *,
    is_batch_invariant: bool,
    varlen_function: VarlenFunction = TORCH_VARLEN,
) -> AttentionBackend:
    """Make a backend over ``pool``.

    Args:
        name: MATMUL, VARLEN or REFERENCE.
        pool: keys and values.
        product_dtype: of the operands of matrix products (MATMUL).
        is_batch_invariant: see ``VarlenAttention``.
        varlen_function: the kernel of VARLEN.
    """
    if name == VARLEN:
        return VarlenAttention(pool, is_batch_invariant=is_batch_invariant, attend=varlen_function)
    if name == REFERENCE:
        return ReferenceAttention(pool)
    assert name == MATMUL
    return MatmulAttention(pool, product_dtype)


def _varlen_obstacle(
    model: PreTrainedModel, layers: Sequence[LayerShape], dtype: torch.dtype
) -> str | None:
    """Return why the kernel cannot serve a model here; None if nothing is known against it."""
    device = model.device
    if device.type != "cuda":
        return f"it needs a CUDA device, not '{device.type}'"
    if torch.cuda.get_device_capability(device) < varlen.CAPABILITY:
        major, minor = varlen.CAPABILITY
        return f"it needs a GPU of compute capability {major}.{minor} or more"
    return _layer_obstacle(model, layers, dtype)


def _layer_obstacle(
    model: PreTrainedModel, layers: Sequence[LayerShape], dtype: torch.dtype
) -> str | None:
    if dtype not in varlen.DTYPES:
        return f"it needs half precision, not {str(dtype).removeprefix('torch.')}"
    for layer in layers:
        if layer.key_width != layer.value_width:
            return "keys and values of this model are not equally wide"
        if layer.key_width > varlen.MAX_WIDTH or layer.key_width % varlen.WIDTH_MULTIPLE:
            return (
                f"heads of this model are {layer.key_width} wide; it takes multiples of "
                f"{varlen.WIDTH_MULTIPLE} up to {varlen.MAX_WIDTH}"
            )
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return "this model's scores have a soft cap"
    if any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()):
        return "this model's attention has sinks"
    return None
