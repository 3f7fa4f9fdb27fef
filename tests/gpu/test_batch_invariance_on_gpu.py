"""``batch_invariant`` on a GPU: company changes no bit of tokens and log probabilities."""

import pytest
import torch

from models.config import (
    AUTO,
    MATMUL,
    VARLEN,
    AdapterConfig,
    EngineConfig,
    KVCacheConfig,
    ModelConfig,
    SchedulerConfig,
)
from models.engine.build import assemble
from models.errors import ConfigError
from models.loading.loader import load_model
from models.text.tokenizer import Text
from tests.company import assert_company_changes_nothing
from tests.harness import make_parts, random_prompts
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model

pytestmark = pytest.mark.gpu


def family(name):
    return next(family for family in FAMILIES if family.name == name)


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        ("llama", torch.bfloat16, VARLEN),
        ("llama", torch.bfloat16, MATMUL),
        ("llama", torch.float32, MATMUL),
        ("gemma3", torch.bfloat16, VARLEN),
        ("gemma2", torch.bfloat16, MATMUL),
        ("gpt2", torch.float16, VARLEN),
    ],
)
def test_company_changes_no_bit_of_a_tiny_model(name, dtype, backend):
    prompts = random_prompts(9, vocabulary_size=VOCABULARY_SIZE, seed=2, longest=120)

    def make_engine(budget):
        parts = make_parts(
            make_model(family(name), dtype=dtype).to("cuda"),
            num_blocks=600,
            block_size=16,
            max_num_batched_tokens=budget,
            is_prefix_caching_enabled=False,
            attention_backend=backend,
            adapters=AdapterConfig(path="anywhere"),
            is_batch_invariant=True,
        )
        assert parts.row_policy.is_fixed
        assert parts.attention_backend == backend
        return parts

    assert_company_changes_nothing(make_engine, prompts)


@pytest.mark.parametrize("backend", [AUTO, MATMUL])
def test_company_changes_no_bit_of_the_bundled_model(backend, bundled_model_path):
    path = str(bundled_model_path)
    config = ModelConfig(device="cuda", attention_backend=backend, is_batch_invariant=True)
    text = Text.load(path)
    prompts = [
        [100 + token for token in prompt]
        for prompt in random_prompts(12, vocabulary_size=40_000, seed=3, longest=300)
    ]

    def make_engine(budget):
        return assemble(
            load_model(config, path, lambda _: None),
            text,
            EngineConfig(
                model=config,
                kv_cache=KVCacheConfig(is_prefix_caching_enabled=False),
                scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=budget),
            ),
        )

    assert_company_changes_nothing(make_engine, prompts)


def test_a_mixture_of_experts_is_refused_by_the_settings_name():
    with pytest.raises(ConfigError, match="experts") as caught:
        make_parts(make_model(family("mixtral")).to("cuda"), is_batch_invariant=True)

    assert caught.value.field == "batch_invariant"
