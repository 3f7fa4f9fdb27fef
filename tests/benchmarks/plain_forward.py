"""The model's own forward pass as transformers has it: the yardstick of a decode step."""

from __future__ import annotations

import statistics
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

_NUM_WARM_UP_STEPS = 4


def load_plain_model(path: str) -> PreTrainedModel:
    """Return the model in bfloat16 with the attention that transformers would take itself."""
    transformers_logging.disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    return model.eval()


@torch.inference_mode()
def time_plain_decode_ms(
    model: PreTrainedModel, num_rows: int, *, num_kv_tokens: int, num_steps: int
) -> float:
    """Return the mean milliseconds of one decode step of ``num_rows`` rows, forward pass alone.

    Args:
        model: on the CPU.
        num_rows: sequences, all of one length.
        num_kv_tokens: mean length of the KV cache over the timed steps.
        num_steps: timed steps.
    """
    config = model.config
    num_first_tokens = num_kv_tokens - num_steps // 2 - _NUM_WARM_UP_STEPS
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (num_rows, config.num_key_value_heads, num_first_tokens, width)
    generator = torch.Generator().manual_seed(0)
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        # What the keys hold does not change what they cost.
        keys = torch.randn(shape, generator=generator).to(model.dtype)
        cache.update(keys, keys.clone(), layer)
    token_ids = torch.randint(config.vocab_size, (num_rows, 1), generator=generator)
    seconds = []
    for _ in range(_NUM_WARM_UP_STEPS + num_steps):
        began_at_s = time.monotonic()
        model(input_ids=token_ids, cache=cache, use_cache=True)
        seconds.append(time.monotonic() - began_at_s)
    return 1000 * statistics.fmean(seconds[_NUM_WARM_UP_STEPS:])
