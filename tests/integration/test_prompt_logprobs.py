"""Log probabilities of prompts: transformers' own numbers, and the law of row independence.

Tiny models. In bfloat16 heads are 32 wide: of narrower ones the products of attention are not
row-independent on every processor.
"""

import dataclasses

import pytest
import torch

from tests.harness import make_parts, make_request, random_prompts, run
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model

pytestmark = pytest.mark.integration

NUM_TOP = 3
LONGEST = 60
PROMPTS = [
    prompt
    for prompt in random_prompts(9, vocabulary_size=VOCABULARY_SIZE, seed=4, longest=LONGEST)
    if len(prompt) > 1
]


def family(name):
    return next(each for each in FAMILIES if each.name == name)


def ask(index, *, max_tokens=0, num_choices=1):
    return make_request(
        f"r{index}",
        seed=index,
        temperature=0.9,
        max_tokens=max_tokens,
        num_top_logprobs=1,
        num_choices=num_choices,
        num_prompt_logprobs=NUM_TOP,
    )


@torch.inference_mode()
def own_log_softmax(model, prompt):
    """Return log probabilities of every position but the last, from the model's own forward."""
    return model(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(dim=1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral"])
def test_float32_equals_the_log_softmax_of_the_models_own_forward_in_chunks_of_any_size(name):
    model = make_model(family(name))
    expected = [own_log_softmax(model, prompt) for prompt in PROMPTS]
    jobs = [(ask(index), prompt) for index, prompt in enumerate(PROMPTS)]

    for num_batched, num_scored in ((256, 1000), (16, 1000), (64, 11)):
        parts = make_parts(
            make_model(family(name)),
            num_blocks=200,
            max_num_batched_tokens=num_batched,
            max_num_scored_positions=num_scored,
        )
        outputs = run(parts, jobs)

        for index, (prompt, rows) in enumerate(zip(PROMPTS, expected, strict=True)):
            told = outputs[f"r{index}", 0].prompt_logprobs
            assert [each.token_id for each in told] == prompt[1:]
            for row, each in zip(rows, told, strict=True):
                assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-4)
                best = row.topk(NUM_TOP).values.tolist()
                assert [value for _, value in each.top] == pytest.approx(best, abs=1e-4)
                for token_id, value in each.top:
                    assert value == pytest.approx(float(row[token_id]), abs=1e-4)
                # but for tokens that are as good as equal
                nearly = int((row > row[each.token_id] - 1e-4).sum())
                clearly = int((row > row[each.token_id] + 1e-4).sum())
                assert clearly + 1 <= each.rank <= nearly


@pytest.fixture(scope="module")
def model():
    return make_model(family("llama"), dtype=torch.bfloat16, head_dim=32)


def make_engine(model, **limits):
    return make_parts(model, **{"num_blocks": 400, "max_num_batched_tokens": 256, **limits})


NUM_TOKENS = 12


@pytest.fixture(scope="module")
def alone(model):
    """Every request by itself, its prompt in one piece."""
    parts = make_engine(model, is_prefix_caching_enabled=False)
    outputs = {}
    for index, prompt in enumerate(PROMPTS):
        outputs.update(run(parts, [(ask(index, max_tokens=NUM_TOKENS), prompt)]))
    return outputs


def assert_equal(outputs, expected):
    assert outputs.keys() == expected.keys()
    for key, output in outputs.items():
        assert dataclasses.asdict(output) == dataclasses.asdict(expected[key]), key


def jobs_of_all():
    return [(ask(index, max_tokens=NUM_TOKENS), prompt) for index, prompt in enumerate(PROMPTS)]


def run_all(parts, **options):
    return run(parts, jobs_of_all(), **options)


def num_broken_off(plans):
    """Return how often a sequence that had part of its prompt scored joined again, for the rest."""
    scored, rejoined = set(), set()
    count = 0
    for plan in plans:
        rejoined |= {joining.seq_id for joining in plan.joining} & scored
        now = {row.seq_id for row in plan.sequences if row.scored_positions}
        count += len(now & rejoined)
        rejoined -= now
        scored |= now
    return count


def test_the_prompts_have_different_log_probabilities(alone):
    told = [each.logprob for output in alone.values() for each in output.prompt_logprobs]

    assert len(told) == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert len(set(told)) > 0.9 * len(told)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_batched_tokens": 17},
        {"max_num_batched_tokens": 64, "max_num_scored_positions": 2},
        {"block_size": 16, "num_blocks": 100},
    ],
    ids=["chunks", "scored", "blocks"],
)
def test_chunks_and_neighbours_change_no_bit(model, alone, limits):
    arrivals = {f"r{index}": index for index in range(len(PROMPTS))}

    assert_equal(run_all(make_engine(model, **limits), arrivals=arrivals), alone)


def test_constant_preemption_changes_no_bit(model, alone, monkeypatch):
    # Long outputs of others take the blocks of those whose prompts are being scored.
    parts = make_engine(
        model,
        num_blocks=48,
        block_size=2,
        max_num_batched_tokens=40,
        max_num_scored_positions=3,
    )
    plans = []
    execute = parts.runner.execute
    monkeypatch.setattr(
        parts.runner, "execute", lambda plan: (plans.append(plan), execute(plan))[1]
    )
    others = [
        (make_request(f"other{index}", temperature=0.0, max_tokens=60), [1, 2 + index])
        for index in range(2)
    ]

    outputs = run(parts, [*others, *jobs_of_all()])

    assert_equal({key: outputs[key] for key in alone}, alone)
    assert num_broken_off(plans) >= 3


def test_a_warm_prefix_cache_changes_no_bit(model, alone):
    parts = make_engine(model)
    run_all(parts)

    assert_equal(run_all(parts), alone)


def test_several_choices_or_none_to_draw_change_no_bit(model, alone):
    jobs = [
        (ask(index, max_tokens=NUM_TOKENS * (index % 2), num_choices=3), prompt)
        for index, prompt in enumerate(PROMPTS)
    ]

    outputs = run(make_engine(model, max_num_batched_tokens=32, max_num_scored_positions=9), jobs)

    for index in range(len(PROMPTS)):
        output = outputs[f"r{index}", 0]
        assert output.prompt_logprobs == alone[f"r{index}", 0].prompt_logprobs
        if index % 2:
            assert output.logprobs == alone[f"r{index}", 0].logprobs
        assert [len(outputs[f"r{index}", i].token_ids) for i in range(3)] == [
            NUM_TOKENS * (index % 2)
        ] * 3
        assert not outputs[f"r{index}", 1].prompt_logprobs


def test_a_drawn_token_has_the_same_log_probability_as_part_of_a_prompt(model, alone):
    index = max(range(len(PROMPTS)), key=lambda each: len(PROMPTS[each]))
    drawn = alone[f"r{index}", 0]
    longer = [*PROMPTS[index], *drawn.token_ids]

    told = run(make_engine(model), [(ask(index), longer)])[f"r{index}", 0].prompt_logprobs

    tail = told[-len(drawn.token_ids) :]
    assert [each.logprob for each in tail] == [each.logprob for each in drawn.logprobs]
    assert [each.top[:1] for each in tail] == [each.top for each in drawn.logprobs]
