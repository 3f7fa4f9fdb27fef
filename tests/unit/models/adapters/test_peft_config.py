"""Every key of a configuration is understood, ignored by name or refused by name."""

import dataclasses
import json
import math
import warnings

import pytest
from peft import IA3Config, LoraConfig
from peft.utils import PeftType

from models.adapters.faults import AdapterFaultError
from models.adapters.peft_config import MAX_CONFIG_BYTES, read_peft_config
from models.adapters.trained_biases import TrainedBiases

LORA = {"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"], "r": 8, "lora_alpha": 16}
SERVED = (
    "IA3",
    "LOHA",
    "LOKR",
    "LORA",
    "OFT",
    "PREFIX_TUNING",
    "PROMPT_TUNING",
    "P_TUNING",
    "TRAINABLE_TOKENS",
    "VERA",
)
IA3 = {"peft_type": "IA3", "target_modules": ["k", "down"], "feedforward_modules": ["down"]}


def read(**changes):
    return read_peft_config(json.dumps(LORA | changes).encode()).method


def read_ia3(**changes):
    return read_peft_config(json.dumps(IA3 | changes).encode()).method


def refusal(**changes):
    with pytest.raises(AdapterFaultError) as caught:
        read(**changes)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def as_file(config):
    """What PEFT writes for a configuration."""
    values = config.to_dict()
    return {key: list(item) if isinstance(item, set) else item for key, item in values.items()}


def test_whatever_peft_writes_by_default_is_understood():
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)

    spec = read_peft_config(json.dumps(as_file(config)).encode()).method

    assert spec.rank == 8
    assert spec.trained_biases == TrainedBiases.NONE
    assert spec.targets.targets == frozenset(["q_proj"])


@pytest.mark.parametrize(("read", "config"), [(read, LoraConfig), (read_ia3, IA3Config)])
def test_every_option_of_peft_is_known(read, config):
    # Each is switched on with nonsense: one that is neither used, ignored nor refused would be
    # called unknown.
    names = [field.name for field in dataclasses.fields(config) if "init" not in field.name]

    for name in names:
        assert "option" not in outcome(read, {name: {"some": "value"}}), name


def outcome(read, changes):
    try:
        return repr(read(**changes))
    except AdapterFaultError as fault:
        return str(fault)


def test_what_an_option_says_arrives():
    spec = read(
        base_model_name_or_path="org/base",
        bias="lora_only",
        use_rslora=True,
        lora_bias=True,
        lora_alpha=1.5,
        rank_pattern={"q_proj": 3},
        alpha_pattern={"q_proj": 2.5},
        layers_to_transform=[1, 2],
        layers_pattern="h",
        exclude_modules=["x"],
    )

    assert spec.base_name == "org/base"
    assert spec.trained_biases == TrainedBiases.TARGETS
    assert spec.scale(9, 6.0) == pytest.approx(2.0)
    assert read().scale(9, 18.0) == pytest.approx(2.0)
    assert spec.has_output_bias
    assert not spec.has_magnitudes
    assert spec.alpha == 1.5
    assert spec.rank_pattern == {"q_proj": 3}
    assert spec.alpha_pattern == {"q_proj": 2.5}
    assert spec.targets.layers == frozenset([1, 2])
    assert spec.targets.layers_patterns == ("h",)
    assert spec.targets.excluded == frozenset(["x"])


@pytest.mark.parametrize("method", [kind.value for kind in PeftType] + ["NONSENSE", "lora"])
def test_other_methods_are_refused_by_name(method):
    if method in SERVED:
        return

    assert f"'{method}' is not supported" in refusal(peft_type=method)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alora_invocation_tokens", [5, 6]),
        ("arrow_config", {"top_k": 3}),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("target_parameters", ["mlp.experts.down_proj"]),
        ("megatron_config", {"a": 1}),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("velora_config", {"scale": 1.0}),
        ("monteclora_config", {"num_samples": 8}),
        ("kasa_config", {"beta": 1.0}),
        ("ensure_weight_tying", True),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, value):
    message = refusal(**{name: value})

    assert f"({name}) is not supported yet" in message
    read(**{name: None})


@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_4", "PiSSA", "olora", "OLoRA", "corda", "loftq", "lora_ga"]
)
def test_inits_that_changed_the_base_weights_are_refused(init):
    assert f"'{init}', which changes the base weights" in refusal(init_lora_weights=init)


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_inits_that_left_the_base_alone_are_served(init):
    assert read(init_lora_weights=init).rank == 8


def test_pefts_own_list_of_inits_that_it_must_convert_is_refused_whole():
    # If PEFT learns a further one, its own conversion names it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for init in ("pissa", "corda", "olora", "lora_ga"):
            config = LoraConfig(target_modules=["q"], init_lora_weights=init)
            with pytest.raises(AdapterFaultError, match="changes the base weights"):
                read_peft_config(json.dumps(as_file(config), default=vars).encode())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task_type": "SEQ_CLS"}, "the task 'SEQ_CLS'"),
        ({"task_type": 5}, "task_type must be a text"),
        ({"peft_type": None}, "names no peft_type"),
        ({"peft_type": ["LORA"]}, "peft_type must be a text"),
        ({"init_lora_weights": "future"}, "init_lora_weights 'future'"),
        ({"init_lora_weights": ["gaussian"]}, "init_lora_weights ['gaussian']"),
        ({"new_in_peft_9": {"on": 1}}, "'new_in_peft_9' is not known"),
        ({"target_modules": None}, "target_modules are not given"),
        ({"target_modules": []}, "target_modules are not given"),
        ({"target_modules": ["q", 5]}, "target_modules must be"),
        ({"target_modules": {"q": 1}}, "target_modules must be"),
        ({"exclude_modules": 5}, "exclude_modules must be"),
        ({"r": 0}, "r must be a whole number of at least 1, not 0"),
        ({"r": True}, "not True"),
        ({"r": 8.0}, "not 8.0"),
        ({"r": "8"}, "r must be"),
        ({"lora_alpha": math.nan}, "lora_alpha must be a finite number"),
        ({"lora_alpha": math.inf}, "lora_alpha must be a finite number"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a finite number"),
        ({"lora_alpha": False}, "lora_alpha must be a finite number"),
        ({"rank_pattern": {"q": -1}}, "rank_pattern must be"),
        ({"rank_pattern": ["q"]}, "rank_pattern must be a mapping"),
        ({"alpha_pattern": {"q": None}}, "alpha_pattern must be"),
        ({"bias": "some"}, "bias must be none, all or lora_only, not 'some'"),
        ({"bias": True}, "bias must be a text"),
        ({"use_dora": "yes"}, "use_dora must be true or false"),
        ({"use_dora": 1}, "use_dora must be true or false"),
        ({"use_dora": True, "lora_bias": True}, "exclude each other"),
        ({"fan_in_fan_out": "x"}, "fan_in_fan_out must be"),
        ({"layers_to_transform": "1"}, "layers_to_transform must be"),
        ({"layers_to_transform": [True]}, "layers_to_transform must be"),
        ({"layers_pattern": "h"}, "needs layers_to_transform"),
        ({"layers_pattern": [5], "layers_to_transform": 1}, "layers_pattern must be"),
        ({"target_modules": "q.*", "layers_to_transform": 1}, "need target_modules as a list"),
        ({"base_model_name_or_path": 7}, "base_model_name_or_path must be a text"),
        ({"peft_type": "X" * 5000}, "XXX..."),
        ({"peft_type": "a\nb\x00"}, "'a?b?'"),
    ],
)
def test_bad_values_are_refused_by_name(changes, words):
    assert words in refusal(**changes)


def test_an_unknown_option_that_is_switched_off_is_no_obstacle():
    assert read(new_a=None, new_b=False, new_c=[], new_d={}, new_e="").rank == 8


def test_a_mapping_to_classes_is_never_followed():
    mapping = {"base_model_class": "os", "parent_library": "nonsense.module"}

    assert read(auto_mapping=mapping).rank == 8


def test_ia3_needs_to_know_its_feedforward_modules():
    assert read_ia3(feedforward_modules=[]).feedforward == frozenset()
    assert read_ia3(feedforward_modules=r".*\.d").feedforward == r".*\.d"
    with pytest.raises(AdapterFaultError, match="feedforward_modules are not given"):
        read_ia3(feedforward_modules=None)


@pytest.mark.parametrize(
    "encoded",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"r": ' + b"9" * 6000 + b"}"],
    ids=lambda encoded: repr(encoded[:8]),
)
def test_what_is_no_json_object_is_refused(encoded):
    with pytest.raises(AdapterFaultError, match="is no JSON"):
        read_peft_config(encoded)


def test_an_absurd_size_is_refused():
    with pytest.raises(AdapterFaultError, match="larger than"):
        read_peft_config(b" " * (MAX_CONFIG_BYTES + 1))
