"""Which modules of a loaded model an adapter may change, found by a probing forward pass."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from models.adapters.weights import ModuleShape
from models.attention.backend import own_attention
from models.runner.linear_layers import Float32Head
from models.runner.row_stability import LINEAR_CLASSES

# No model has so many heads, so that tokens are not taken for heads.
_PROBE_TOKENS = 11
# Of a table's rows against what the module gives of them, in its own dtype.
_TABLE_TOLERANCE = 2.0**-6


@dataclasses.dataclass(slots=True)
class _Calls:
    """How often a module was called, and how often with one row per token."""

    num_calls: int = 0
    num_with_all_rows: int = 0


def discover_modules(model: PreTrainedModel) -> tuple[ModuleShape, ...]:
    """Return what an adapter may change: modules through which every row passes exactly once.

    These are linear layers, norms and tables of embeddings; and the output head, which sees the
    wanted rows only. Others (the experts of a mixture, which see some of the rows) cannot be
    changed.
    """
    calls: dict[str, _Calls] = {}
    handles = []
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if _is_changeable(module):
            called = calls.setdefault(name, _Calls())

            def note(
                module: nn.Module,
                inputs: tuple[object, ...],
                outputs: object,
                called: _Calls = called,
            ) -> None:
                called.num_calls += 1
                if inputs and isinstance(inputs[0], Tensor) and isinstance(outputs, Tensor):
                    called.num_with_all_rows += _has_all_rows(module, inputs[0], outputs)

            handles.append(module.register_forward_hook(note))
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode(), own_attention(model):
            model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(
        _shape_of(name, model.get_submodule(name))
        for name, called in calls.items()
        if called.num_calls == 1
        and (called.num_with_all_rows == 1 or model.get_submodule(name) is head)
    )


def _is_changeable(module: nn.Module) -> bool:
    # A subclass may compute something else than a product (the router of phimoe does).
    if type(module) in (*LINEAR_CLASSES, Float32Head):
        return True
    if isinstance(module, nn.Embedding):
        return True
    weight = getattr(module, "weight", None)
    is_norm = isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("Norm")
    return is_norm and isinstance(weight, nn.Parameter) and weight.dim() == 1


def _has_all_rows(module: nn.Module, inputs: Tensor, outputs: Tensor) -> bool:
    """Tell whether a module was given one row per token, in their order."""
    if isinstance(module, nn.Embedding):
        return inputs.numel() == _PROBE_TOKENS and _is_table(module, inputs, outputs)
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.dim() == 1 and inputs.dim() == 4 and getattr(module, "bias", None) is None:
        # A norm of every head: [1, T, H, D].
        return inputs.shape[:2] == (1, _PROBE_TOKENS)
    return inputs.numel() == _PROBE_TOKENS * inputs.shape[-1]


def _is_table(module: nn.Embedding, ids: Tensor, outputs: Tensor) -> bool:
    """Tell whether an embedding gives the scaled rows of its weight; a subclass may not."""
    rows = module.weight[ids].float() * _output_scale(module)
    return outputs.shape == rows.shape and torch.allclose(
        outputs.float(), rows, rtol=_TABLE_TOLERANCE, atol=0
    )


def _output_scale(module: nn.Module) -> float:
    return float(getattr(module, "embed_scale", 1.0))


def _shape_of(name: str, module: nn.Module) -> ModuleShape:
    weight = module.weight
    assert isinstance(weight, Tensor)
    has_bias = getattr(module, "bias", None) is not None
    if weight.dim() == 1:
        width = weight.shape[0]
        return ModuleShape(
            name=name,
            num_inputs=width,
            num_outputs=width,
            is_norm=True,
            has_bias=has_bias,
            weight_dtype=weight.dtype,
        )
    is_embedding = isinstance(module, nn.Embedding)
    is_transposed = isinstance(module, Conv1D)
    first, second = weight.shape
    if not (is_transposed or is_embedding):
        first, second = second, first
    return ModuleShape(
        name=name,
        num_inputs=first,
        num_outputs=second,
        is_transposed=is_transposed,
        is_embedding=is_embedding,
        has_bias=has_bias,
        output_scale=_output_scale(module) if is_embedding else 1.0,
        weight_dtype=weight.dtype,
    )
