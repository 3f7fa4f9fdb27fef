"""The law: what a request gets depends on the request alone, bit for bit in bfloat16 on the CPU.

Text (tokens) and log probabilities of the real model, each request alone against every way to
disturb it.
"""

import dataclasses

import pytest

from models.config import EngineConfig, KVCacheConfig, ModelConfig, SchedulerConfig
from models.engine.build import assemble
from models.loading.loader import load_model
from models.requests import TextPrompt
from models.text.tokenizer import Text
from sampling.params import derive_seed
from tests.harness import make_request, run

pytestmark = pytest.mark.integration

NUM_TOKENS = 20
BYTES_PER_TOKEN = 23040
TOPICS = (
    "the sea, and all that lives in it",
    "a machine that sorts letters",
    "bread",
    "the history of the number zero, told by somebody who does not like numbers at all",
    "rain on a tin roof; " * 12,
    "why the sky is blue",
)
PREAMBLE = "You will be given a subject. Answer in plain words and say nothing twice. " * 5


@pytest.fixture(scope="module")
def model(bundled_model_path):
    config = ModelConfig()
    path = str(bundled_model_path)
    return load_model(config, path, lambda _: None), Text.load(path)


@pytest.fixture(scope="module")
def prompts(model):
    return [model[1].encode(TextPrompt(text=f"{PREAMBLE}Write about {topic}.")) for topic in TOPICS]


def _engine(model, *, num_blocks=400, block_size=16, budget=256, max_num_seqs=16, is_cached=False):
    loaded, text = model
    return assemble(
        loaded,
        text,
        EngineConfig(
            kv_cache=KVCacheConfig(
                budget_bytes=BYTES_PER_TOKEN * block_size * (num_blocks + 1),
                block_size_tokens=block_size,
                is_prefix_caching_enabled=is_cached,
            ),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
        ),
    )


def _jobs(prompts):
    """Return half of them greedy, half of them seeded, all with log probabilities."""
    return [
        (
            make_request(
                f"r{index}",
                seed=1000 + index,
                temperature=0.0 if index % 2 else 0.8,
                top_p=0.9 if index % 3 else 1.0,
                max_tokens=NUM_TOKENS,
                num_top_logprobs=2,
                ignore_eos=True,
            ),
            prompt,
        )
        for index, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def alone(model, prompts):
    parts = _engine(model)
    outputs = {}
    for job in _jobs(prompts):
        outputs.update(run(parts, [job]))
    return outputs


def _assert_equal(outputs, expected):
    for key, output in outputs.items():
        assert output.token_ids == expected[key].token_ids, key
        assert output.logprobs == expected[key].logprobs, key


def test_the_requests_differ(alone):
    assert len({tuple(output.token_ids) for output in alone.values()}) == len(TOPICS)


def test_a_batch_with_staggered_arrivals_changes_nothing(model, prompts, alone):
    arrivals = {f"r{index}": 2 * index for index in range(len(prompts))}

    outputs = run(_engine(model), _jobs(prompts), arrivals=arrivals)

    _assert_equal(outputs, alone)


def test_other_chunk_borders_and_rows_change_nothing(model, prompts, alone):
    parts = _engine(model, budget=37)

    outputs = run(parts, reversed(_jobs(prompts)))

    _assert_equal(outputs, alone)


def test_constant_preemption_changes_nothing(model, prompts, alone):
    longest = max(map(len, prompts)) + NUM_TOKENS
    parts = _engine(model, num_blocks=-(-longest // 2) + 6, block_size=2, budget=64)

    outputs = run(parts, _jobs(prompts))

    _assert_equal(outputs, alone)
    assert parts.engine.stats().num_preemptions > 0


def test_a_crowd_of_forty_with_every_disturbance_at_once_changes_nothing(model, prompts, alone):
    # More rows than one tile of a product, prefix hits, small chunks, blocks for a few of them.
    parts = _engine(model, num_blocks=320, block_size=2, budget=61, max_num_seqs=48, is_cached=True)
    jobs = [
        (dataclasses.replace(request, request_id=f"{request.request_id}-{copy}"), prompt)
        for copy in range(7)
        for request, prompt in _jobs(prompts)
    ][:40]

    outputs = run(parts, jobs, arrivals={job[0].request_id: i // 4 for i, job in enumerate(jobs)})

    assert len(outputs) == 40
    for (request_id, choice), output in outputs.items():
        expected = alone[request_id.split("-")[0], choice]
        assert output.token_ids == expected.token_ids, request_id
        assert output.logprobs == expected.logprobs, request_id
    assert parts.engine.stats().num_preemptions > 0


def test_prefix_hits_change_nothing(model, prompts, alone):
    parts = _engine(model, is_cached=True)
    cold = run(parts, _jobs(prompts))
    renamed = [
        (dataclasses.replace(request, request_id=f"again-{request.request_id}"), prompt)
        for request, prompt in _jobs(prompts)
    ]

    num_cached = [
        parts.engine.add(request, tuple(prompt)).num_cached_tokens for request, prompt in renamed
    ]
    warm = run(parts, [])

    assert min(num_cached) >= len(prompts[0]) // 32 * 16
    _assert_equal(cold, alone)
    for (request_id, choice), output in warm.items():
        expected = alone[request_id.removeprefix("again-"), choice]
        assert output.token_ids == expected.token_ids
        assert output.logprobs == expected.logprobs


def test_four_choices_equal_four_single_runs_with_derived_seeds(model, prompts):
    def ask(request_id, seed, num_choices):
        request = make_request(
            request_id,
            seed=seed,
            num_choices=num_choices,
            temperature=1.0,
            max_tokens=NUM_TOKENS,
            num_top_logprobs=1,
            ignore_eos=True,
        )
        return request, prompts[2]

    together = run(_engine(model), [ask("n4", 7, 4), *_jobs(prompts[:2])])
    singles = _engine(model)

    outputs = [
        run(singles, [ask(f"n1-{index}", derive_seed(7, index), 1)])[f"n1-{index}", 0]
        for index in range(4)
    ]

    assert len({tuple(output.token_ids) for output in outputs}) == 4
    for index, output in enumerate(outputs):
        assert together["n4", index].token_ids == output.token_ids
        assert together["n4", index].logprobs == output.logprobs
