"""Tokens that an adapter has added behind the base's vocabulary are valid in its rows only."""

import copy
import dataclasses
import math

import pytest
import torch
from peft import LoraConfig, PeftModel, TrainableTokensConfig
from transformers import AutoModelForCausalLM

from models.adapters.reading import parse_adapter
from models.adapters.source import AdapterContents
from models.errors import InvalidRequestError
from models.requests import AdapterRef
from sampling.errors import InvalidSamplingParamsError
from tests.harness import make_request, run
from tests.integration.test_adapter_tables import make_engine
from tests.integration.test_adapters import SHARED, greedy_by_forward
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model
from tests.unit.models.adapters.peft_adapters import SavedAdapter, facts_of, quiet, refusal

pytestmark = pytest.mark.integration

ADDED = [VOCABULARY_SIZE, VOCABULARY_SIZE + 1, VOCABULARY_SIZE + 2]
NUM_TOKENS = 10
PROMPT = [*SHARED[:7], ADDED[1], 5, ADDED[0], ADDED[2], 9]
BIASED = {"embed_tokens": [3, *ADDED], "lm_head": ADDED}


def lora(**options):
    fields = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**fields | options)


class Added:
    """An adapter that was trained on a model with three more tokens, and that model."""

    def __init__(self, folder, base, config, *, are_tables_saved=False):
        torch.manual_seed(5)
        with quiet():
            self.resized = copy.deepcopy(base)
            self.resized.resize_token_embeddings(ADDED[-1] + 1)
        self.saved = SavedAdapter(folder, self.resized, config)
        # Large rows, so that the new tokens are drawn.
        self.saved.edit_tensors(
            lambda name, tensor: tensor * 20 if "tokens_delta" in name else tensor
        )
        if are_tables_saved:
            for name in ("lm_head", "model.embed_tokens"):
                table = self.resized.get_submodule(name).weight.detach().clone()
                part = "token_adapter.base_layer.weight" if "embed" in name else "weight"
                self.saved.add_tensor(f"base_model.model.{name}.{part}", table)

    def read(self, facts, name):
        contents = AdapterContents(
            config=(self.saved.folder / "adapter_config.json").read_bytes(),
            weights=(self.saved.folder / "adapter_model.safetensors").read_bytes(),
        )
        return parse_adapter(AdapterRef(name, "v1"), contents, facts)

    def reference(self):
        with quiet():
            model = PeftModel.from_pretrained(copy.deepcopy(self.resized), self.saved.folder)
        return model.eval()


def make_base(name, **options):
    family = next(each for each in FAMILIES if each.name == name)
    return make_model(family, **options)


CASES = {
    "tied": ("llama", {"tie_word_embeddings": True}, lora(trainable_token_indices=ADDED), False),
    "tied-alone": (
        "llama",
        {"tie_word_embeddings": True},
        TrainableTokensConfig(token_indices=[*ADDED, 4], task_type="CAUSAL_LM"),
        False,
    ),
    "both": ("qwen3", {}, lora(trainable_token_indices=BIASED), False),
    # Whose logits pass through a function behind the head.
    "both-capped": ("gemma2", {}, lora(trainable_token_indices=BIASED), False),
    "tables-saved": ("llama", {}, lora(trainable_token_indices=[ADDED[-1], 3]), True),
}


@pytest.mark.parametrize("case", CASES)
def test_prompts_and_answers_with_added_tokens_equal_pefts_forward(tmp_path, case):
    name, options, config, are_tables_saved = CASES[case]
    base = make_base(name, **options)
    facts = facts_of(base)
    added = Added(tmp_path / "added", base, config, are_tables_saved=are_tables_saved)
    other = SavedAdapter(tmp_path / "other", base, lora(target_modules=["lm_head", "embed_tokens"]))
    weights = {"added": added.read(facts, "added"), "other": other.read(facts)}
    assert weights["added"].num_added_tokens == 3
    prompts = {"added": PROMPT, "other": SHARED, "base": SHARED}
    with quiet():
        other_model = PeftModel.from_pretrained(copy.deepcopy(base), other.folder).eval()
    models = {"added": added.reference(), "other": other_model, "base": base}
    expected = {
        key: greedy_by_forward(models[key], prompt, NUM_TOKENS) for key, prompt in prompts.items()
    }
    if not are_tables_saved:
        assert set(expected["added"]) & set(ADDED)

    outputs = run(
        make_engine(base, max_num_batched_tokens=17),
        [
            (make_request(key, temperature=0.0, max_tokens=NUM_TOKENS), prompt)
            for key, prompt in prompts.items()
        ],
        adapters=weights,
    )

    assert {key[0]: output.token_ids for key, output in outputs.items()} == expected


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A base model in bfloat16, an adapter of it with added tokens, and one without."""
    folder = tmp_path_factory.mktemp("llama")
    options = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
    wide = make_base("llama", **options)
    facts = facts_of(wide)
    both = Added(folder / "both", wide, lora(trainable_token_indices=BIASED)).read(facts, "both")
    blind = Added(folder / "blind", wide, lora(trainable_token_indices=ADDED)).read(facts, "blind")
    plain = SavedAdapter(folder / "plain", wide, lora(target_modules=["lm_head"])).read(facts)
    base = make_base("llama", dtype=torch.bfloat16, **options)
    return base, {"both": both, "blind": blind, "plain": plain}


def test_other_rows_keep_their_bits_beside_added_tokens(llama):
    base, weights = llama
    sampling = {"max_tokens": NUM_TOKENS, "num_top_logprobs": 5, "frequency_penalty": 0.3}
    jobs = [
        (make_request(name, seed=3, temperature=temperature, **options, **sampling), SHARED)
        for name, temperature, options in (
            ("greedy", 0.0, {}),
            ("drawn", 1.3, {"top_p": 0.97}),
            ("wide", 2.0, {}),
            ("plain", 1.0, {"min_p": 0.01}),
        )
    ]
    jobs.append((make_request("both", seed=4, temperature=1.0, **sampling), PROMPT))
    engine = make_engine(base, is_prefix_caching_enabled=False)
    alone = {}
    for job in jobs:
        alone |= run(engine, [job], adapters={key: weights[key] for key in ("both", "plain")})

    together = run(engine, jobs, adapters={key: weights[key] for key in ("both", "plain")})

    assert set(together["both", 0].token_ids) & set(ADDED)
    for key, output in together.items():
        assert output.token_ids == alone[key].token_ids, key
        assert output.logprobs == alone[key].logprobs, key
        if key[0] != "both":
            assert max(output.token_ids) < VOCABULARY_SIZE
            tops = [token_id for each in output.logprobs for token_id, _ in each.top]
            assert not set(tops) & set(ADDED)


def test_a_bias_can_force_an_added_token_that_has_logits(llama):
    base, weights = llama
    sampling = {"logit_bias": ((ADDED[2], 100.0),), "max_tokens": 2, "temperature": 0.0}
    jobs = [(make_request(name, **sampling), PROMPT) for name in ("both", "blind")]

    outputs = run(make_engine(base), jobs, adapters=weights)

    assert outputs["both", 0].token_ids == [ADDED[2]] * 2
    # Its file has no rows of the output head for them: they are never drawn.
    assert max(outputs["blind", 0].token_ids) < VOCABULARY_SIZE


def test_an_added_token_ends_an_answer_and_is_held_back_before(llama):
    base, weights = llama
    fields = {"logit_bias": ((ADDED[0], 100.0),), "stop_token_ids": (ADDED[0],), "max_tokens": 6}
    jobs = [
        (make_request(f"{name}", temperature=0.0, min_tokens=minimum, **fields), PROMPT)
        for name, minimum in (("first", 0), ("second", 3))
    ]

    outputs = run(
        make_engine(base), jobs, adapters=dict.fromkeys(("first", "second"), weights["both"])
    )

    assert [len(outputs[name, 0].token_ids) for name in ("first", "second")] == [1, 4]
    assert ADDED[0] not in outputs["second", 0].token_ids[:3]


def test_log_probabilities_of_a_prompt_with_added_tokens(llama):
    base, weights = llama
    jobs = [
        (make_request(name, temperature=0.0, max_tokens=1, num_prompt_logprobs=0), prompt)
        for name, prompt in (("both", PROMPT), ("base", SHARED))
    ]

    outputs = run(make_engine(base), jobs, adapters={"both": weights["both"]})
    alone = run(make_engine(base), jobs[1:])

    told = {each.token_id: each.logprob for each in outputs["both", 0].prompt_logprobs}
    assert all(math.isfinite(told[token_id]) for token_id in ADDED)
    assert outputs["base", 0].prompt_logprobs == alone["base", 0].prompt_logprobs


def test_added_ids_are_refused_for_everybody_else(llama):
    base, weights = llama
    engine = make_engine(base).engine

    def prepare(name, prompt, **sampling):
        request = make_request("r", max_tokens=2, **sampling)
        adapter = weights.get(name)
        if adapter is not None:
            request = dataclasses.replace(request, adapter=adapter.ref)
        return engine.prepare(request, tuple(prompt), 0.0, adapter)

    assert prepare("both", PROMPT, logit_bias=((ADDED[2], 1.0),), stop_token_ids=(ADDED[0],))
    for name in ("base", "plain"):
        with pytest.raises(InvalidRequestError, match="is not in"):
            prepare(name, PROMPT)
        with pytest.raises(InvalidSamplingParamsError, match="is not in"):
            prepare(name, SHARED, logit_bias=((ADDED[0], 1.0),))
        with pytest.raises(InvalidSamplingParamsError, match="is not in"):
            prepare(name, SHARED, stop_token_ids=(ADDED[0],))
    with pytest.raises(InvalidRequestError, match="is not in"):
        prepare("both", [*PROMPT, ADDED[-1] + 1])


def test_rows_that_are_missing_and_tables_of_another_base_are_refused(tmp_path):
    base = make_base("llama")
    facts = facts_of(base)
    some = Added(tmp_path / "some", base, lora(trainable_token_indices=ADDED[1:])).saved
    assert f"lacks the row of the added token {ADDED[0]}" in refusal(lambda: some.read(facts))
    far = Added(tmp_path / "far", base, lora(trainable_token_indices=ADDED)).saved
    far.edit_config(trainable_token_indices=[3, 4, 99_999])
    assert "token 99999 is too far behind the vocabulary" in refusal(lambda: far.read(facts))
    saved = Added(
        tmp_path / "saved", base, lora(trainable_token_indices=ADDED), are_tables_saved=True
    ).saved
    assert saved.read(facts).num_added_tokens == 3
    saved.edit_tensors(lambda name, tensor: tensor + 1 if "lm_head" in name else tensor)
    assert "brings a changed weight for 'lm_head'" in refusal(lambda: saved.read(facts))


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        lora(trainable_token_indices=ADDED),
        lora(trainable_token_indices={"embed_tokens": ADDED, "lm_head": ADDED}),
        TrainableTokensConfig(token_indices=ADDED, task_type="CAUSAL_LM"),
    ],
    ids=["list", "both", "alone"],
)
def test_what_peft_saves_with_a_base_model_that_it_knows_is_read(tmp_path, config, is_tied):
    base = make_base("llama", tie_word_embeddings=is_tied)
    base.save_pretrained(tmp_path / "base")
    with quiet():
        resized = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        resized.resize_token_embeddings(ADDED[-1] + 1)

    weights = SavedAdapter(tmp_path / "one", resized, config).read(facts_of(base))

    assert weights.num_added_tokens == 3
    head, embedding = (
        weights.modules[name].token_rows for name in ("lm_head", "model.embed_tokens")
    )
    assert embedding.ids.tolist() == ADDED
    # PEFT saves both tables then, but for the head of trainable tokens alone.
    is_head_known = is_tied or not isinstance(config, TrainableTokensConfig)
    assert (head is not None) == is_head_known
    assert any("never drawn" in warning for warning in weights.warnings) != is_head_known
