"""Attention backends on a GPU, with the kernels that serve, against the reference."""

import logging

import pytest
import torch

from models.attention.choice import make_attention
from models.attention.reference import ReferenceAttention
from models.attention.varlen import BLOCK_MULTIPLE_TOKENS
from models.config import MATMUL, VARLEN
from tests.harness import make_parts, make_request, random_prompts, run
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model
from tests.unit.models.attention.steps import Sequences

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 4e-2}
LENGTHS = [700, 300, 40, 1, 513]


def make_sequences(name, *, is_batch_invariant=False, lengths=LENGTHS, **shapes):
    def make_backend(pool):
        dtype = pool.keys[0].dtype
        return make_attention(name, pool, dtype, is_batch_invariant=is_batch_invariant)

    return Sequences(
        lengths,
        make_backend=ReferenceAttention if name is None else make_backend,
        block_size=BLOCK_MULTIPLE_TOKENS,
        device=torch.device("cuda"),
        **shapes,
    )


STEPS = (
    {0: (0, 600), 1: (0, 256), 2: (0, 30), 4: (0, 512)},
    {0: (600, 699), 1: (256, 257), 2: (30, 38), 3: (0, 1), 4: (512, 513)},
    {0: (699, 700), 1: (257, 258), 2: (38, 39)},
)


@pytest.mark.parametrize("options", [{}, {"scaling": 0.3}, {"sliding_window": 270}], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (9, 3), (8, 1)])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [MATMUL, VARLEN])
def test_steps_equal_the_reference(name, dtype, width, num_heads, num_kv_heads, options):
    shapes = {
        "dtype": dtype,
        "width": width,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
    }
    ours, reference = make_sequences(name, **shapes), make_sequences(None, **shapes)

    for spans in STEPS:
        expected = reference.step(spans, **options)
        found = ours.step(spans, multiple=8, **options)
        for index in spans:
            torch.testing.assert_close(
                found[index].float(),
                expected[index].float(),
                atol=TOLERANCE[dtype],
                rtol=TOLERANCE[dtype],
            )


@pytest.mark.parametrize("name", [MATMUL, VARLEN])
def test_a_former_tenants_nan_does_not_reach_the_next_one(name):
    ours = make_sequences(name, dtype=torch.bfloat16, width=64)
    ours.pool.keys[0][:, :-1] = torch.nan
    ours.pool.values[0][:, :-1] = torch.nan

    for spans in STEPS:
        assert not any(output.isnan().any() for output in ours.step(spans).values())


@pytest.mark.parametrize("options", [{}, {"sliding_window": 270}], ids=str)
@pytest.mark.parametrize("width", [64, 80, 128])
def test_rows_of_varlen_are_equal_bit_for_bit_alone_and_in_any_company(width, options):
    shapes = {"dtype": torch.bfloat16, "width": width, "num_heads": 9, "num_kv_heads": 3}
    lengths = [700, 1200, 3, 350, *[697] * 6]
    ours = make_sequences(VARLEN, is_batch_invariant=True, lengths=lengths, **shapes)
    whole = ours.run(0, [700], **options)
    cut = ours.run(0, [233, 1, 1, 140, 325], **options)
    for index in range(1, len(lengths)):
        ours.run(index, [lengths[index]], **options)

    alone = ours.step({0: (699, 700)}, **options)[0]
    decodes = {index: (length - 1, length) for index, length in enumerate(lengths)}
    company = ours.step(decodes, **options)[0]
    mixed = ours.step({1: (1160, 1200), 0: (699, 700), 2: (0, 3)}, **options)[0]

    assert torch.equal(cut, whole)
    for found in (alone, company, mixed):
        assert torch.equal(found[0], whole[-1])


ON_VARLEN = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "gpt2")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_an_engine_takes_varlen_where_it_can(family, caplog):
    model = make_model(family, dtype=torch.bfloat16).to("cuda")
    with caplog.at_level(logging.WARNING, logger="models"):
        parts = make_parts(model, num_blocks=300, block_size=16)

    if family.name in ON_VARLEN:
        assert parts.attention_backend == VARLEN
        assert parts.kv_plan.block_size_tokens == BLOCK_MULTIPLE_TOKENS
    if family.name == "gemma2":
        assert parts.attention_backend == MATMUL
        assert parts.kv_plan.block_size_tokens == 16
    assert not caplog.records


def test_engines_with_both_backends_give_nearly_the_same_log_probabilities():
    prompts = random_prompts(6, vocabulary_size=VOCABULARY_SIZE, seed=1, longest=200)
    jobs = [
        (
            make_request(
                f"r{index}",
                temperature=0.0,
                max_tokens=1,
                num_top_logprobs=0,
                num_prompt_logprobs=0,
            ),
            prompt,
        )
        for index, prompt in enumerate(prompts)
    ]
    found = {}
    for name in (MATMUL, VARLEN):
        model = make_model(FAMILIES[0], dtype=torch.bfloat16).to("cuda")
        parts = make_parts(
            model, num_blocks=300, block_size=16, max_num_batched_tokens=64, attention_backend=name
        )
        outputs = run(parts, jobs, arrivals={"r3": 2})
        found[name] = [
            each.logprob
            for key in sorted(outputs)
            for each in (*outputs[key].prompt_logprobs, *outputs[key].logprobs)
        ]

    differences = torch.tensor(found[MATMUL]) - torch.tensor(found[VARLEN])
    assert differences.abs().mean() < 0.05
