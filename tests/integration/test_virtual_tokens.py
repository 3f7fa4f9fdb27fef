"""Virtual tokens in mixed batches: each row gets what PEFT's own forward says, nobody sees them."""

import copy
import dataclasses
import itertools

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
)

from models.errors import ContextLengthExceededError, PromptTooLongError
from models.requests import AdapterRef, Admission, GenerationEnd, Usage
from sampling.params import derive_seed
from tests.harness import make_request, run
from tests.integration.test_adapters import (
    SHARED,
    greedy_by_forward,
    make_engine,
    make_jobs,
    weights_of,
)
from tests.tiny_models import FAMILIES, make_model
from tests.unit.models.adapters.peft_adapters import MODELS, SavedAdapter, facts_of, quiet
from tests.unit.models.runner.test_adapter_layers import LINEARS

pytestmark = [
    pytest.mark.integration,
    # PEFT hands the keys and values of prefix tuning over by the old name.
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning"),
]

NUM_TOKENS = 6
NUM_VIRTUAL = {"lora": 0, "prompt": 5, "p-tuned": 11, "prefix": 7, "projected": 3, None: 0}
WITH_VIRTUAL = [name for name, num_virtual in NUM_VIRTUAL.items() if num_virtual]
CHOICES = ["prompt", None, "p-tuned", "prefix", "lora", "projected", "prefix", "p-tuned", "prompt"]
WINDOW = 40
# Products of at least 64 x 64: below, torch takes another kernel for few rows.
WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}


def configs(family):
    common = {"task_type": "CAUSAL_LM"}
    virtual = {
        name: {"num_virtual_tokens": number, **common} for name, number in NUM_VIRTUAL.items()
    }
    return {
        "lora": LoraConfig(**common, r=4, lora_alpha=16, target_modules=LINEARS[family]),
        "prompt": PromptTuningConfig(**virtual["prompt"]),
        "p-tuned": PromptEncoderConfig(**virtual["p-tuned"], encoder_hidden_size=32),
        "prefix": PrefixTuningConfig(**virtual["prefix"]),
        "projected": PrefixTuningConfig(
            **virtual["projected"], prefix_projection=True, encoder_hidden_size=32
        ),
    }


class Zoo:
    """One adapter of each kind on a tiny model, as PEFT made them and as the engine reads them."""

    def __init__(self, family, folder, **overrides):
        if overrides:
            self.base = make_model(next(f for f in FAMILIES if f.name == family), **overrides)
        else:
            self.base = copy.deepcopy(MODELS[family])
        if family == "gpt2":  # PEFT believes it, GPT-2 has no such thing
            del self.base.config.num_key_value_heads
        self._folder = folder
        facts = facts_of(self.base)
        self.weights = {
            name: SavedAdapter(folder / name, self.base, config, adapter_id=name).read(facts)
            for name, config in configs(family).items()
        }
        self._references = {None: self.base}
        self._expected = {}

    def reference(self, name):
        """Return PEFT's model, or the base model for None."""
        if name not in self._references:
            with quiet():
                model = PeftModel.from_pretrained(copy.deepcopy(self.base), self._folder / name)
            self._references[name] = model.eval()
        return self._references[name]

    def expected(self, jobs, owners):
        """Return the greedy tokens of every request, by PEFT's forward."""
        told = {}
        for request, prompt in jobs:
            name = owners.get(request.request_id)
            key = (name, tuple(prompt), request.sampling.max_tokens)
            if key not in self._expected:
                self._expected[key] = greedy_by_forward(self.reference(name), prompt, key[2])
            told[request.request_id] = self._expected[key]
        return told

    @torch.inference_mode()
    def logits(self, name, prompt):
        """Return PEFT's logits of a prompt's own tokens, [T, V]."""
        logits = self.reference(name)(torch.tensor([prompt]), use_cache=False).logits[0]
        return logits[-len(prompt) :]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2", "qwen3-moe"])
def zoo(request, tmp_path_factory):
    return Zoo(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    return Zoo("llama", tmp_path_factory.mktemp("llamas"))


@pytest.fixture(scope="module")
def engine_parts(llamas):
    """An engine that several tests use, whatever is in its prefix index by then."""
    return make_engine(llamas)


@pytest.fixture(scope="module")
def small_parts(llamas):
    """The same with a window of 40 tokens, and no more room than that."""
    return make_engine(llamas, max_model_len_tokens=WINDOW, num_blocks=WINDOW // 4)


def tokens_of(outputs):
    return {request_id: output.token_ids for (request_id, _), output in outputs.items()}


def plans_of(parts, monkeypatch):
    """Return a list that will hold every plan of an engine."""
    plans = []
    execute = parts.runner.execute
    monkeypatch.setattr(
        parts.runner, "execute", lambda plan: (plans.append(plan), execute(plan))[1]
    )
    return plans


def events_of(zoo, parts, name, prompt, request_id="r", **options):
    """Run one request to its end and return its admission and all events."""
    request = make_request(request_id, **{"temperature": 0.0, "max_tokens": 4} | options)
    weights = zoo.weights.get(name)
    if weights is not None:
        request = dataclasses.replace(request, adapter=weights.ref)
    engine = parts.engine
    admission = engine.admit(engine.prepare(request, tuple(prompt), 1e18, weights), weights)
    events = []
    while engine.has_work:
        events.extend(event for _, event in engine.step())
    return admission, events


def test_all_kinds_in_one_batch_equal_pefts_forward(zoo):
    jobs, owners = make_jobs(CHOICES, num_tokens=NUM_TOKENS)
    expected = zoo.expected(jobs, owners)
    assert len({tuple(tokens) for tokens in expected.values()}) > len(CHOICES) / 2

    outputs = run(
        make_engine(zoo),
        jobs,
        arrivals={f"r{index}": index for index in range(len(jobs))},
        adapters=weights_of(zoo, owners),
    )

    assert tokens_of(outputs) == expected


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 3, "max_num_batched_tokens": 3},
        {"max_num_seqs": 4, "max_num_batched_tokens": 7, "is_prefix_caching_enabled": False},
        {"max_num_seqs": 2, "max_num_batched_tokens": 2, "max_num_slots": 1},
    ],
    ids=["chunks", "no-cache", "one-slot"],
)
def test_chunks_may_end_inside_of_the_virtual_tokens(llamas, monkeypatch, limits):
    jobs, owners = make_jobs(CHOICES[:6], num_tokens=3)
    parts = make_engine(llamas, **limits)
    plans = plans_of(parts, monkeypatch)

    outputs = run(parts, jobs, adapters=weights_of(llamas, owners))

    cut = [row for plan in plans for row in plan.sequences if row.end < row.num_virtual_tokens]
    assert len(cut) >= 3
    assert tokens_of(outputs) == llamas.expected(jobs, owners)


def test_constant_preemption_changes_nothing(llamas):
    jobs, owners = make_jobs(CHOICES, num_tokens=NUM_TOKENS)
    parts = make_engine(llamas, num_blocks=40, block_size=2, max_num_batched_tokens=30)
    # They grow at the expense of the younger ones.
    long_jobs = [
        (make_request(f"long{number}", temperature=0.0, max_tokens=60), [1, 2 + number])
        for number in range(2)
    ]

    outputs = run(parts, [*long_jobs, *jobs], adapters=weights_of(llamas, owners))

    assert parts.engine.stats().num_preemptions >= 3
    expected = llamas.expected(jobs, owners)
    told = tokens_of(outputs)
    assert {request_id: told[request_id] for request_id in expected} == expected


def test_usage_and_cached_tokens_do_not_count_virtual_ones(llamas):
    parts = make_engine(llamas)
    for name, num_virtual in NUM_VIRTUAL.items():
        # whole blocks of 4, never the last token of all
        num_reused = (num_virtual + len(SHARED) - 1) // 4 * 4
        num_cached_tokens = (0, num_reused - num_virtual, 0)
        prompts = (SHARED, SHARED, [token + 1 for token in SHARED])
        drawn = []
        for prompt, num_cached in zip(prompts, num_cached_tokens, strict=True):
            admission, events = events_of(llamas, parts, name, prompt)

            assert isinstance(admission, Admission)
            assert admission.num_prompt_tokens == len(SHARED)
            assert admission.num_cached_tokens == num_cached
            assert events[-1] == GenerationEnd(Usage(len(SHARED), 4, num_cached))
            drawn.append([event.token_ids for event in events[:-1]])
        assert drawn[0] == drawn[1]
    assert parts.engine.stats().num_prompt_tokens == 3 * len(NUM_VIRTUAL) * len(SHARED)


@pytest.mark.parametrize("name", WITH_VIRTUAL)
def test_virtual_tokens_are_computed_once_whatever_text_follows(
    llamas, engine_parts, monkeypatch, name
):
    events_of(llamas, engine_parts, name, [1, 2, 3])
    plans = plans_of(engine_parts, monkeypatch)

    events_of(llamas, engine_parts, name, [9, 8, 7])

    assert plans[0].sequences[0].start == NUM_VIRTUAL[name] // 4 * 4


def test_versions_and_adapters_share_no_virtual_tokens(llamas, engine_parts):
    old, other = llamas.weights["prompt"], llamas.weights["prefix"]
    new = dataclasses.replace(
        old, ref=AdapterRef(old.ref.id, "v2"), virtual_tokens=other.virtual_tokens
    )
    job = make_request("r", temperature=0.0, max_tokens=NUM_TOKENS), SHARED

    told = [
        tokens_of(run(engine_parts, [job], adapters={"r": each}))["r"] for each in (old, new, other)
    ]

    assert told[0] == greedy_by_forward(llamas.reference("prompt"), SHARED, NUM_TOKENS)
    assert told[1] == told[2] != told[0]


def test_log_probabilities_of_prompts_equal_the_log_softmax_of_pefts_forward(zoo):
    parts = make_engine(zoo, max_num_batched_tokens=16, max_num_scored_positions=9, num_blocks=22)
    prompts = {"lora": SHARED, None: SHARED[3:], "prompt": SHARED[5:9]} | {
        name: SHARED[index:] for index, name in enumerate(("p-tuned", "prefix", "projected"))
    }
    # each twice: the virtual tokens of the second come from the prefix index
    names = [*prompts, *prompts]
    jobs = [
        (
            make_request(f"r{index}", temperature=0.0, max_tokens=3, num_prompt_logprobs=2),
            prompts[name],
        )
        for index, name in enumerate(names)
    ]
    owners = {f"r{index}": name for index, name in enumerate(names) if name is not None}

    outputs = run(parts, jobs, adapters=weights_of(zoo, owners))

    for index, name in enumerate(names):
        prompt = prompts[name]
        told = outputs[f"r{index}", 0].prompt_logprobs
        rows = zoo.logits(name, prompt)[:-1].double().log_softmax(dim=1)
        assert [each.token_id for each in told] == prompt[1:]
        for row, each in zip(rows, told, strict=True):
            assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-4)
            assert [value for _, value in each.top] == pytest.approx(
                row.topk(2).values.tolist(), abs=1e-4
            )


def test_one_token_of_text_has_no_log_probability_even_behind_virtual_tokens(llamas, engine_parts):
    jobs = [
        (make_request("r", temperature=0.0, max_tokens=0, num_prompt_logprobs=0), [17]),
        (make_request("s", temperature=0.0, max_tokens=3, num_prompt_logprobs=0), [17]),
    ]
    weights = dict.fromkeys(("r", "s"), llamas.weights["prefix"])

    outputs = run(engine_parts, jobs, adapters=weights)

    assert [output.prompt_logprobs for output in outputs.values()] == [[], []]
    assert outputs["s", 0].token_ids == greedy_by_forward(llamas.reference("prefix"), [17], 3)


@pytest.mark.parametrize("name", WITH_VIRTUAL)
def test_each_of_many_choices_equals_the_single_request_with_its_seed(llamas, engine_parts, name):
    options = {"temperature": 1.1, "max_tokens": NUM_TOKENS}
    weights = llamas.weights[name]

    many = run(
        engine_parts,
        [(make_request("r", seed=5, num_choices=3, **options), SHARED)],
        adapters={"r": weights},
    )
    single = [
        run(
            engine_parts,
            [(make_request("r", seed=derive_seed(5, choice), **options), SHARED)],
            adapters={"r": weights},
        )["r", 0]
        for choice in range(3)
    ]

    assert [many["r", choice].token_ids for choice in range(3)] == [
        each.token_ids for each in single
    ]
    assert len({tuple(each.token_ids) for each in single}) == 3


@pytest.mark.parametrize("name", WITH_VIRTUAL)
def test_a_stream_that_another_engine_began_goes_on_where_it_was(llamas, engine_parts, name):
    whole = greedy_by_forward(llamas.reference(name), SHARED, NUM_TOKENS)
    request = dataclasses.replace(
        make_request("r", temperature=0.0, max_tokens=NUM_TOKENS),
        emitted_token_ids=(tuple(whole[:4]),),
    )

    outputs = run(engine_parts, [(request, SHARED)], adapters={"r": llamas.weights[name]})

    assert outputs["r", 0].token_ids == whole[4:]


def test_penalties_see_no_virtual_tokens(llamas, engine_parts):
    # Token 0 stands in for virtual tokens inside of the engine: let it be drawn if it may.
    bias, penalty = 6.0, 1.7
    request = make_request(
        "r", temperature=0.0, max_tokens=1, repetition_penalty=penalty, logit_bias=((0, bias),)
    )
    starts = range(len(SHARED) - 6)
    prompts = [SHARED[start : start + 6] for start in starts]
    drawn, expected, penalised = [], [], []
    for prompt in prompts:
        outputs = run(engine_parts, [(request, prompt)], adapters={"r": llamas.weights["prompt"]})
        drawn += outputs["r", 0].token_ids
        logits = llamas.logits("prompt", prompt)[-1]
        for seen, told in ((prompt, expected), ([0, *prompt], penalised)):
            scores = logits.clone()
            own = scores[list(seen)]
            scores[list(seen)] = torch.where(own > 0, own / penalty, own * penalty)
            scores[0] += bias
            told.append(int(scores.argmax()))

    assert drawn == expected
    assert expected != penalised


@pytest.mark.parametrize("name", WITH_VIRTUAL)
def test_virtual_tokens_take_room_in_the_window_and_errors_say_so(llamas, small_parts, name):
    num_virtual = NUM_VIRTUAL[name]
    weights = llamas.weights[name]
    engine = small_parts.engine
    room = WINDOW - num_virtual
    prompt = tuple(range(1, 21))

    def prepare(num_prompt_tokens, max_tokens, **options):
        request = dataclasses.replace(
            make_request("r", max_tokens=max_tokens), adapter=weights.ref, **options
        )
        return engine.prepare(request, tuple(range(1, 1 + num_prompt_tokens)), 0.0, weights)

    assert prepare(20, room - 20).params.max_tokens == room - 20
    assert prepare(20, 1, is_max_tokens_explicit=False).params.max_tokens == room - 20
    assert prepare(room, 0, num_prompt_logprobs=0).params.max_tokens == 0
    with pytest.raises(ContextLengthExceededError) as caught:
        prepare(20, room - 19)
    assert str(caught.value) == (
        f"max_tokens is {room - 19} and the prompt has 20 tokens behind the adapter's "
        f"{num_virtual} virtual ones, together 41; this model's window is 40 tokens"
    )
    with pytest.raises(PromptTooLongError) as too_long:
        prepare(room, 1)
    assert str(too_long.value) == (
        f"the prompt has {room} tokens behind the adapter's {num_virtual} virtual ones; this "
        "model's window of 40 tokens must hold them and at least one new token"
    )
    with pytest.raises(ContextLengthExceededError):
        prepare(room + 1, 0, num_prompt_logprobs=0)

    outputs = run(
        small_parts,
        [(make_request("r", temperature=0.0, max_tokens=room - 20), prompt)],
        adapters={"r": weights},
    )

    assert outputs["r", 0].token_ids == greedy_by_forward(llamas.reference(name), prompt, room - 20)


def test_the_last_learned_position_can_be_used(tmp_path):
    gpt2s = Zoo("gpt2", tmp_path, n_positions=40, max_position_embeddings=40)
    jobs = [
        (make_request(name, temperature=0.0, max_tokens=20 - NUM_VIRTUAL[name]), SHARED[:20])
        for name in WITH_VIRTUAL
    ]

    outputs = run(
        make_engine(gpt2s), jobs, adapters={name: gpt2s.weights[name] for name in WITH_VIRTUAL}
    )

    for name in WITH_VIRTUAL:
        expected = greedy_by_forward(gpt2s.reference(name), SHARED[:20], 20 - NUM_VIRTUAL[name])
        assert outputs[name, 0].token_ids == expected


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_windows_of_layers_and_scaled_embeddings_are_as_in_pefts_forward(tmp_path, family):
    base = MODELS[family]
    facts = facts_of(base)
    jobs = [(make_request(name, temperature=0.0, max_tokens=8), SHARED) for name in ("a", "b", "c")]
    kinds = {
        "a": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
        "b": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6),
        "c": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=15),
    }
    weights, expected = {}, {}
    for name, config in kinds.items():
        saved = SavedAdapter(tmp_path / name, base, config, adapter_id=name)
        weights[name] = saved.read(facts)
        with quiet():
            model = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name).eval()
        expected[name] = greedy_by_forward(model, SHARED, 8)
    zoo = type("Zoo", (), {"base": base})

    outputs = run(make_engine(zoo), jobs, adapters=weights)

    assert tokens_of(outputs) == expected


def test_in_bfloat16_company_chunks_slots_and_the_prefix_index_change_no_bit(tmp_path):
    zoo = Zoo("llama", tmp_path, **WIDE)
    half = copy.deepcopy(zoo.base).to(torch.bfloat16)
    jobs, owners = make_jobs(CHOICES, num_tokens=4)
    weights = weights_of(zoo, owners)
    parts = make_engine(zoo, model=half)
    alone = {}
    for request, prompt in jobs:
        salted = dataclasses.replace(request, cache_salt=request.request_id)
        alone |= run(parts, [(salted, prompt)], adapters=weights)
    assert len({tuple(output.token_ids) for output in alone.values()}) > len(CHOICES) / 2

    crowd = run(parts, jobs, adapters=weights)
    warm = run(parts, jobs, adapters=weights)
    churn = run(
        make_engine(zoo, model=half, max_num_slots=2, max_num_seqs=4, max_num_batched_tokens=6),
        list(reversed(jobs)),
        adapters=weights,
    )

    for outputs, (key, output) in itertools.product((crowd, warm, churn), alone.items()):
        assert outputs[key].token_ids == output.token_ids, key
        assert outputs[key].logprobs == output.logprobs, key
