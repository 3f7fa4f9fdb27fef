"""Plugs attention into a loaded model, and shows that it computes what it should before it serves.

A backend that the configuration did not ask for by name has a substitute: what goes wrong with it
at load is told in a warning, and the model is served with MatmulAttention.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from models.attention.backend import AttentionBackend, attach
from models.attention.choice import AttentionChoice, make_attention
from models.attention.varlen import TORCH_VARLEN, VarlenFunction
from models.config import MATMUL, VARLEN
from models.errors import ConfigError
from models.kv_cache.store import KVCachePool
from models.loading.arithmetic import product_dtype
from models.loading.loader import LoadedModel
from models.runner.attention_check import check_attention
from models.runner.batch_invariance import check_batch_invariance
from models.runner.packed_forward import PackedForward
from models.runner.self_check import check_model

_logger = logging.getLogger(__name__)

# Makes the forward pass that goes with a backend.
MakeForward = Callable[[AttentionBackend], PackedForward]


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionParts:
    """A model that attends to the KV pool, checked.

    Attributes:
        name: of the backend.
        forward: runs packed inputs through the model.
        self_check_error: relative error of logits that the self-check found.
    """

    name: str
    forward: PackedForward
    self_check_error: float


def build_attention(
    loaded: LoadedModel,
    pool: KVCachePool,
    choice: AttentionChoice,
    make_forward: MakeForward,
    *,
    is_fixed: bool,
    model_id: str,
    varlen_function: VarlenFunction = TORCH_VARLEN,
) -> AttentionParts:
    """Attach a backend to the model and check it.

    Args:
        loaded: the model.
        pool: that the backend reads and writes.
        choice: which backend.
        make_forward: called once for every backend that is tried.
        is_fixed: of the RowPolicy.
        model_id: for messages.
        varlen_function: the kernel of VARLEN.

    Raises:
        ConfigError: the model is not served, with the reason.
    """
    if choice.name != VARLEN:
        return _plug(choice.name, loaded, pool, make_forward, is_fixed, model_id, varlen_function)
    try:
        return _plug(VARLEN, loaded, pool, make_forward, is_fixed, model_id, varlen_function)
    except Exception as fault:  # a kernel of others, on a device that we may not know
        reason = " ".join(str(fault).split())
        if choice.is_asked_for:
            raise ConfigError("attention_backend", f"'{VARLEN}' cannot run: {reason}") from fault
        _logger.warning(
            "attention by %s cannot serve '%s' here, %s does: %s", VARLEN, model_id, MATMUL, reason
        )
    return _plug(MATMUL, loaded, pool, make_forward, is_fixed, model_id, varlen_function)


def _plug(
    name: str,
    loaded: LoadedModel,
    pool: KVCachePool,
    make_forward: MakeForward,
    is_fixed: bool,
    model_id: str,
    varlen_function: VarlenFunction,
) -> AttentionParts:
    model = loaded.model
    backend = make_attention(
        name,
        pool,
        product_dtype(loaded.dtype, model.device),
        is_batch_invariant=is_fixed,
        varlen_function=varlen_function,
    )
    attach(model, backend)
    forward = make_forward(backend)
    error = check_model(model, forward, pool, name=model_id)
    if name == VARLEN:
        heads = model.config.get_text_config().num_attention_heads
        check_attention(backend, pool, loaded.layers, num_heads=heads, name=name)
    if is_fixed:
        check_batch_invariance(forward, pool, vocabulary_size=loaded.vocabulary_size)
    return AttentionParts(name, forward, error)
