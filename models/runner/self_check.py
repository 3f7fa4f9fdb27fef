"""Shows on the loaded weights that packed, chunked execution equals the model's own forward."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.attention.backend import own_attention
from models.errors import ConfigError
from models.kv_cache.store import KVCachePool
from models.runner.packed_forward import PackedForward
from models.scheduling.step_plan import ScheduledSequence

# Relative error of all logits (norm of the difference over the norm). The arithmetic differs in
# the order of summation only; a wrong mask, position, or missing key is an error of order 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
LENGTHS = (11, 7)
CHUNK = 4


def check_model(
    model: PreTrainedModel, forward: PackedForward, pool: KVCachePool, *, name: str
) -> float:
    """Compare logits of two short sequences; leaves the pool empty in the ledger's sense.

    Uses the first blocks of the pool, before any sequence does.

    Args:
        model: with our backend attached.
        forward: through the same backend.
        pool: has room for both sequences.
        name: for the message.

    Returns:
        The largest relative error of the two sequences.

    Raises:
        ConfigError: the results differ, are not numbers, or the pool is too small to tell.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary_size = model.get_input_embeddings().weight.shape[0]
    prompts = [
        torch.randint(vocabulary_size, (length,), generator=generator).tolist()
        for length in LENGTHS
    ]
    chunked = _run_chunked(forward, prompts, _tables(pool))
    is_routed = model.dtype != torch.float32 and _has_experts(model)
    worst = 0.0
    for prompt, logits in zip(prompts, chunked, strict=True):
        error = _relative_error(logits, _own_forward(model, prompt), is_routed=is_routed)
        if not math.isfinite(error):
            raise ConfigError("model", f"'{name}' is not served: its logits are not finite numbers")
        worst = max(worst, error)
    if worst > TOLERANCE[model.dtype]:
        raise ConfigError(
            "model",
            f"'{name}' is not served: packed and chunked, its logits differ from those of its own "
            f"forward pass by {worst:.2g} (at most {TOLERANCE[model.dtype]:g} is expected)",
        )
    return worst


def _has_experts(model: PreTrainedModel) -> bool:
    return any(parameter.dim() > 2 for parameter in model.parameters())


def _relative_error(logits: Tensor, expected: Tensor, *, is_routed: bool) -> float:
    """Return the error of [T, V] logits: of all tokens, or with ``is_routed`` of the median token.

    Where two experts are nearly equal, the last bit of half precision decides which of them a
    token gets; such a token differs by tens of percent with nothing being wrong. What is wrong
    with a model's attention shows in most tokens.
    """
    difference = logits - expected
    if is_routed:
        return float((difference.norm(dim=1) / expected.norm(dim=1)).median())
    return float(difference.norm() / expected.norm())


def _tables(pool: KVCachePool) -> list[tuple[int, ...]]:
    size = pool.plan.block_size_tokens
    needed = [-(-length // size) for length in LENGTHS]
    if sum(needed) > pool.plan.num_blocks:
        raise ConfigError(
            "kv_budget_bytes",
            f"{pool.plan.num_blocks} KV blocks of {size} tokens are too few; "
            f"a check at the start needs {sum(needed)}",
        )
    return [tuple(range(needed[0])), tuple(range(needed[0], sum(needed)))]


def _run_chunked(
    forward: PackedForward, prompts: list[list[int]], tables: list[tuple[int, ...]]
) -> list[Tensor]:
    """Return the logits of every token, float32, from steps that mix both sequences.

    The first sequence runs in chunks, its end token by token; the second joins a step later.
    """
    collected: list[list[Tensor]] = [[] for _ in prompts]
    done = [0, 0]
    step = 0
    while done != [len(prompt) for prompt in prompts]:
        parts: list[ScheduledSequence] = []
        for index, prompt in enumerate(prompts):
            is_due = index <= step and done[index] < len(prompt)
            size = CHUNK if done[index] < CHUNK + index else 1
            if is_due:
                taken = tuple(prompt[done[index] : done[index] + size])
                parts.append(
                    ScheduledSequence(index, taken, done[index], tables[index], is_sampled=True)
                )
        inputs = forward.pack(parts)
        rows = [
            row
            for part, last in zip(parts, inputs.last_rows, strict=True)
            for row in range(last + 1 - len(part.token_ids), last + 1)
        ]
        logits = forward.run(inputs, rows)
        assert logits is not None
        offset = 0
        for part in parts:
            collected[part.seq_id].append(logits[offset : offset + len(part.token_ids)].float())
            offset += len(part.token_ids)
            done[part.seq_id] = part.end
        step += 1
    return [torch.cat(parts) for parts in collected]


@torch.inference_mode()
def _own_forward(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    with own_attention(model):
        tokens = torch.tensor([prompt], device=model.device)
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0]
        return logits.float()
