"""Tiny random models of many architectures, spread so that their greedy outputs vary."""

import dataclasses
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY_SIZE = 199
COMMON = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # A tied head favours the token that was just read, whatever the layers say.
    "tie_word_embeddings": False,
}
WINDOW_TOKENS = 9
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture in its smallest interesting form."""

    name: str
    model_type: str
    extra: dict[str, Any]


FAMILIES = (
    Family("llama", "llama", {}),
    Family("qwen2", "qwen2", {}),
    Family("qwen3", "qwen3", {"head_dim": 16}),
    Family("mistral", "mistral", {"sliding_window": WINDOW_TOKENS, "head_dim": 16}),
    Family(
        "gemma2",
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": WINDOW_TOKENS,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    Family(
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": WINDOW_TOKENS,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Family("phi3", "phi3", {}),
    Family("gpt2", "gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    Family("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("qwen3-moe", "qwen3_moe", {"num_experts": 4, "head_dim": 16, **MOE}),
)


def make_model(
    family: Family,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> PreTrainedModel:
    """Return a random model in evaluation mode; the same arguments give the same weights."""
    config_class = CONFIG_MAPPING[family.model_type]
    config = config_class(**{**COMMON, **family.extra, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    spread_weights_(model, seed)
    return model.to(dtype).eval()


@torch.no_grad()
def spread_weights_(model: PreTrainedModel, seed: int) -> None:
    """Redraw all weights: default ones repeat one token on some families.

    A parity test on such a model could not fail.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(parameter: torch.Tensor) -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator)

    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            is_table = "embed" in name or "wte" in name or "lm_head" in name
            scale = 1.0 if is_table else 2.0 / parameter.shape[-1] ** 0.5
            parameter.copy_(noise(parameter) * scale)
        elif name.endswith("bias"):
            parameter.copy_(noise(parameter) * 0.3)
        else:
            parameter.add_(noise(parameter) * 0.1)


def greedy_reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Return what transformers' ``generate`` continues a prompt with, greedily."""
    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()
