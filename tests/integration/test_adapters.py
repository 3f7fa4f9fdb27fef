"""Many adapters in one engine: each row gets what PEFT's own forward says, in any company."""

import copy
import dataclasses

import pytest
import torch
from peft import PeftModel

from models.adapters.reading import parse_adapter
from models.adapters.source import AdapterContents
from models.config import AdapterConfig
from models.requests import AdapterRef
from tests.harness import make_parts, make_request, random_prompts, run
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model
from tests.unit.models.adapters.peft_adapters import MODELS, SavedAdapter, facts_of, quiet
from tests.unit.models.runner.test_adapter_layers import configs

pytestmark = pytest.mark.integration

NUM_TOKENS = 12
NUM_ADAPTERS = 6
SHARED = list(range(3, 25))


def greedy_by_forward(model, prompt, num_tokens):
    """Continue a prompt by whole forward passes, one for each token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


class Zoo:
    """Six adapters of one tiny model, as PEFT made them and as the engine reads them."""

    def __init__(self, family, folder):
        self.base = MODELS[family]
        self.folders = [folder / str(number) for number in range(NUM_ADAPTERS)]
        for path, config in zip(self.folders, configs(family), strict=True):
            SavedAdapter(path, self.base, config)
        facts = facts_of(self.base)
        self.weights = [self._read(number, facts) for number in range(NUM_ADAPTERS)]

    def _read(self, number, facts):
        contents = AdapterContents(
            config=(self.folders[number] / "adapter_config.json").read_bytes(),
            weights=(self.folders[number] / "adapter_model.safetensors").read_bytes(),
        )
        return parse_adapter(AdapterRef(f"adapter-{number}", "v1"), contents, facts)

    def reference(self, number):
        """Return PEFT's model, or the base model for None."""
        if number is None:
            return self.base
        with quiet():
            return PeftModel.from_pretrained(copy.deepcopy(self.base), self.folders[number]).eval()


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2", "qwen3-moe"])
def zoo(request, tmp_path_factory):
    return Zoo(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    return Zoo("llama", tmp_path_factory.mktemp("llamas"))


def make_jobs(choices, *, num_tokens=NUM_TOKENS, seed=5):
    """Return jobs (the same prompt for neighbours of a kind), and which adapter each has."""
    own = random_prompts(len(choices), vocabulary_size=VOCABULARY_SIZE, seed=seed, longest=9)
    jobs = [
        (
            make_request(f"r{index}", temperature=0.0, max_tokens=num_tokens, num_top_logprobs=2),
            SHARED + own[index // 2],
        )
        for index in range(len(choices))
    ]
    return jobs, {f"r{index}": number for index, number in enumerate(choices) if number is not None}


def weights_of(zoo, owners):
    return {request_id: zoo.weights[number] for request_id, number in owners.items()}


def make_engine(zoo, *, model=None, **options):
    fields = {
        name: options.pop(name)
        for name in ("max_num_slots", "device_budget_bytes", "max_slot_wait_s")
        if name in options
    }
    return make_parts(
        copy.deepcopy(zoo.base if model is None else model),
        adapters=AdapterConfig(path="given by hand", **fields),
        **{"num_blocks": 300, "max_num_batched_tokens": 37} | options,
    )


CHOICES = [0, None, 1, 2, 3, 4, 5, 0, None, 5, 3, 1, 2, 4]


def test_a_mixed_batch_with_prefix_caching_equals_pefts_forward(zoo):
    jobs, owners = make_jobs(CHOICES)
    references = {number: zoo.reference(number) for number in set(CHOICES)}
    expected = {
        request.request_id: greedy_by_forward(
            references[owners.get(request.request_id)], prompt, NUM_TOKENS
        )
        for request, prompt in jobs
    }
    assert len({tuple(tokens) for tokens in expected.values()}) > 10  # adapters show

    outputs = run(
        make_engine(zoo),
        jobs,
        arrivals={f"r{index}": index for index in range(len(CHOICES))},
        adapters=weights_of(zoo, owners),
    )

    assert {key[0]: output.token_ids for key, output in outputs.items()} == expected


def test_interleaved_adapters_equal_cold_solo_runs_with_one_slot_two_slots_and_preemption(llamas):
    jobs, owners = make_jobs(CHOICES)
    weights = weights_of(llamas, owners)
    alone = {}
    for job in jobs:
        alone |= run(make_engine(llamas), [job], adapters=weights)

    for options in (
        {"max_num_slots": 1},
        {"max_num_slots": 2, "max_num_batched_tokens": 16},
        {"num_blocks": 26, "max_num_batched_tokens": 23},
    ):
        parts = make_engine(llamas, **options)
        outputs = run(parts, jobs, adapters=weights)
        assert {key: output.token_ids for key, output in outputs.items()} == {
            key: output.token_ids for key, output in alone.items()
        }, options
        assert parts.adapters.seats.stats.num_resident <= options.get("max_num_slots", 32)


def test_in_bfloat16_neighbours_slots_and_churn_change_no_bit(tmp_path):
    family = next(each for each in FAMILIES if each.name == "llama")
    # Products of at least 64 x 64: below, torch takes another kernel for few rows.
    model = make_model(
        family, dtype=torch.bfloat16, hidden_size=128, head_dim=32, intermediate_size=128
    )
    wide = make_model(family, hidden_size=128, head_dim=32, intermediate_size=128)
    facts = facts_of(wide)
    weights = []
    for number, config in enumerate(configs("llama")):
        SavedAdapter(tmp_path / str(number), wide, config)
        contents = AdapterContents(
            config=(tmp_path / str(number) / "adapter_config.json").read_bytes(),
            weights=(tmp_path / str(number) / "adapter_model.safetensors").read_bytes(),
        )
        weights.append(parse_adapter(AdapterRef(f"adapter-{number}", "v1"), contents, facts))
    jobs, owners = make_jobs(CHOICES)
    by_request = {request_id: weights[number] for request_id, number in owners.items()}
    zoo = type("Zoo", (), {"base": model})
    alone = {}
    for job in jobs:
        alone |= run(make_engine(zoo), [job], adapters=by_request)

    crowd = run(make_engine(zoo), jobs, adapters=by_request)
    churn = run(
        make_engine(zoo, max_num_slots=2, max_num_batched_tokens=16),
        list(reversed(jobs)),
        adapters=by_request,
    )

    for outputs in (crowd, churn):
        for key, output in outputs.items():
            assert output.token_ids == alone[key].token_ids, key
            assert output.logprobs == alone[key].logprobs, key


def test_two_long_streams_do_not_notice_slots_that_are_filled_and_evicted_beside_them(llamas):
    long_jobs = [
        (make_request(f"long{number}", temperature=0.0, max_tokens=60), SHARED)
        for number in range(2)
    ]
    weights = {"long0": llamas.weights[0]}
    alone = {}
    for job in long_jobs:
        alone |= run(make_engine(llamas), [job], adapters=weights)
    short, owners = make_jobs([1, 2, 3, 4, 5] * 4, num_tokens=2)

    parts = make_engine(llamas, max_num_slots=2)
    outputs = run(
        parts,
        [*long_jobs, *short],
        arrivals={request.request_id: 2 + index for index, (request, _) in enumerate(short)},
        adapters=weights | weights_of(llamas, owners),
    )

    for key, output in alone.items():
        assert outputs[key].token_ids == output.token_ids
    assert parts.adapters.seats.stats.num_evictions >= 10


def test_a_new_version_gets_nothing_of_the_old_ones_kv(llamas):
    old = llamas.weights[0]
    new = dataclasses.replace(llamas.weights[1], ref=AdapterRef(old.ref.id, "v2"))
    job = make_request("cold", temperature=0.0, max_tokens=NUM_TOKENS), SHARED
    cold = run(make_engine(llamas), [job], adapters={"cold": new})

    parts = make_engine(llamas)
    first = make_request("first", temperature=0.0, max_tokens=40), SHARED
    second = make_request("second", temperature=0.0, max_tokens=NUM_TOKENS), SHARED
    outputs = run(
        parts, [first, second], arrivals={"second": 8}, adapters={"first": old, "second": new}
    )
    first_alone = run(make_engine(llamas), [first], adapters={"first": old})

    assert outputs["second", 0].token_ids == cold["cold", 0].token_ids
    assert outputs["first", 0].token_ids == first_alone["first", 0].token_ids
