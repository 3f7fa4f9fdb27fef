"""Every option of VeRA, LoHa, LoKr and OFT is understood, ignored by name or refused by name."""

import dataclasses
import json

import pytest
from peft import LoHaConfig, LoKrConfig, OFTConfig, VeraConfig

from models.adapters.faults import AdapterFaultError
from models.adapters.peft_config import read_peft_config
from models.adapters.trained_biases import TrainedBiases
from tests.unit.models.adapters.peft_adapters import quiet

CONFIGS = {"VERA": VeraConfig, "LOHA": LoHaConfig, "LOKR": LoKrConfig, "OFT": OFTConfig}


def read(method, **changes):
    fields = {"peft_type": method, "target_modules": ["q_proj"]}
    if method == "OFT":
        fields["oft_block_size"] = 32
    return read_peft_config(json.dumps(fields | changes).encode()).method


def refusal(method, **changes):
    with pytest.raises(AdapterFaultError) as caught:
        read(method, **changes)
    return str(caught.value)


def options_of(method):
    return {field.name for field in dataclasses.fields(CONFIGS[method])} - {"peft_type"}


@pytest.mark.parametrize("method", CONFIGS)
def test_whatever_peft_writes_by_default_is_understood(method):
    with quiet():
        config = CONFIGS[method](target_modules=["q_proj"], task_type="CAUSAL_LM")
    values = {
        key: list(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }

    read_peft_config(json.dumps(values).encode())


@pytest.mark.parametrize("method", CONFIGS)
def test_every_option_of_peft_is_known(method):
    # Each is switched on with nonsense: one that is neither used, ignored nor refused would be
    # called unknown.
    for name in options_of(method):
        assert "its option" not in outcome(method, {name: {"some": "value"}}), name


def outcome(method, changes):
    try:
        return repr(read(method, **changes))
    except AdapterFaultError as fault:
        return str(fault)


@pytest.mark.parametrize("method", CONFIGS)
def test_options_of_other_methods_are_not_known(method):
    foreign = {
        name: "on"
        for other in CONFIGS
        for name in options_of(other) - options_of(method) - {"exclude_modules"}
    }

    for name in foreign:
        assert f"its option '{name}' is not known here" in refusal(method, **{name: {"a": 1}})


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_modules": None}, "target_modules are not given"),
        ({"layers_pattern": "h"}, "layers_pattern needs layers_to_transform"),
        ({"target_modules": ".*q", "layers_to_transform": [1]}, "need target_modules as a list"),
        ({"r": "x"}, "its r must be a whole number"),
        ({"task_type": "SEQ_CLS"}, "made for the task 'SEQ_CLS'"),
    ],
)
def test_what_all_of_them_refuse(method, changes, words):
    assert words in refusal(method, **changes)


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("VERA", {"save_projection": 1}, "its save_projection must be true or false"),
        ("VERA", {"projection_prng_key": 1.5}, "its projection_prng_key must be a whole number"),
        ("VERA", {"projection_prng_key": 2**64}, "is not a seed of 64 bits"),
        ("VERA", {"projection_prng_key": -(2**63) - 1}, "is not a seed of 64 bits"),
        ("VERA", {"r": 0}, "its r must be a whole number of at least 1, not 0"),
        ("VERA", {"bias": "lora_only"}, "its bias must be none, all or vera_only"),
        ("LOHA", {"alpha": "x"}, "its alpha must be a finite number"),
        ("LOHA", {"rank_pattern": {"q": 0}}, "its rank_pattern must be"),
        ("LOKR", {"decompose_factor": "x"}, "its decompose_factor must be a whole number"),
        ("LOKR", {"decompose_both": 1}, "its decompose_both must be true or false"),
        ("OFT", {"block_share": "no"}, "its block_share must be true or false"),
    ],
)
def test_bad_values_are_refused_by_name(method, changes, words):
    assert words in refusal(method, **changes)


def test_what_an_option_says_arrives():
    vera = read("VERA", r=5, bias="vera_only", base_model_name_or_path="org/base")
    drawn = read("VERA", save_projection=False, projection_prng_key=-3)
    loha = read("LOHA", alpha=1.5, rank_pattern={"q_proj": 3}, alpha_pattern={"q_proj": 2.5})
    lokr = read("LOKR", decompose_both=True, decompose_factor=4, exclude_modules=["x"])
    plain = read("OFT", bias="all")
    oft = read("OFT", coft=True, eps=0.5, block_share=True, use_cayley_neumann=False)

    assert (vera.rank, vera.trained_biases) == (5, TrainedBiases.TARGETS)
    assert (vera.base_name, vera.is_pair_saved, vera.seed) == ("org/base", True, 0)
    assert (drawn.rank, drawn.is_pair_saved, drawn.seed) == (256, False, -3)
    assert (loha.options.rank, loha.options.alpha) == (8, 1.5)
    assert loha.options.rank_pattern == {"q_proj": 3}
    assert loha.options.alpha_pattern == {"q_proj": 2.5}
    assert (lokr.is_left_decomposed, lokr.factor) == (True, 4)
    assert lokr.options.targets.excluded == frozenset(["x"])
    assert (plain.block_size, plain.num_blocks, plain.is_block_shared) == (32, 0, False)
    assert (plain.constraint, plain.num_neumann_terms) == (None, 5)
    assert plain.trained_biases == TrainedBiases.ALL
    assert (oft.constraint, oft.num_neumann_terms, oft.is_block_shared) == (0.5, None, True)
