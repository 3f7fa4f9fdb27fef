"""The modules that a configuration means are those that PEFT's own code finds."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from models.adapters.faults import AdapterFaultError
from models.adapters.patterns import PatternMatcher
from models.adapters.targets import TargetRules, find_value
from models.adapters.virtual_tokens import VirtualTokenFacts
from models.adapters.weights import ModelFacts, ModuleShape

PARTS = ("q", "v", "xq", "mlp", "h", "layers", "0", "1", "12", "experts", "q_v")
names = st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map(".".join)
name_lists = st.lists(names, max_size=4)
patterns = st.sampled_from(
    [r".*\.q", r".*(q|v)", r"h\.\d+\..*", r"layers\.(0|12)\.mlp\.q", "q", r".*", r"(.*\.)?1\.v"]
)
layers = st.none() | st.integers(0, 12) | st.lists(st.sampled_from([0, 1, 12]), min_size=1)
layers_patterns = st.sampled_from([(), ("h",), ("layers",), ("x", "layers"), ("h|layers",)])


def facts(module_names, **options):
    shapes = [ModuleShape(name=name, num_inputs=4, num_outputs=4) for name in module_names]
    return make_facts(shapes, **options)


def make_facts(shapes, *, output_head=None):
    return ModelFacts(
        base_names=("tiny",),
        modules={shape.name: shape for shape in shapes},
        output_head=output_head,
        max_rank=8,
        virtual_tokens=VirtualTokenFacts(max_num_tokens=8, embedding_width=4, key_values=None),
        weight=lambda name: pytest.fail("nobody needs weights"),
        bias=lambda name: pytest.fail("nobody needs biases"),
    )


def selected(rules, model):
    try:
        return {shape.name for shape in rules.select(model, PatternMatcher())}
    except AdapterFaultError:
        return set()


def as_rule(value):
    return value or frozenset() if isinstance(value, str) else frozenset(value)


@settings(max_examples=150, deadline=None)
@given(
    module_names=st.lists(names, min_size=1, max_size=8, unique=True),
    targets=name_lists.filter(bool) | patterns,
    excluded=name_lists | patterns,
    layers=layers,
    layers_patterns=layers_patterns,
)
def test_modules_are_those_that_peft_finds(
    module_names, targets, excluded, layers, layers_patterns
):
    if isinstance(targets, str) or layers is None:
        layers, layers_patterns = None, ()
    config = LoraConfig(
        target_modules=targets,
        exclude_modules=excluded,
        layers_to_transform=layers,
        layers_pattern=list(layers_patterns) or None,
    )
    rules = TargetRules(
        targets=as_rule(targets),
        excluded=as_rule(excluded),
        layers=None
        if layers is None
        else frozenset([layers] if isinstance(layers, int) else layers),
        layers_patterns=layers_patterns,
    )

    # PEFT's marker of an excluded module is truthy, but no match.
    found = {name: check_target_module_exists(config, name) for name in module_names}
    expected = {
        name for name, match in found.items() if match and type(match).__name__ != "_ExcludedModule"
    }

    assert selected(rules, facts(module_names)) == expected


@settings(max_examples=150, deadline=None)
@given(
    module=names,
    keys=st.lists(
        names | patterns | st.sampled_from(["", "q.", "^q", "(?i)Q", "x.", "layers.0", ".q"]),
        max_size=4,
        unique=True,
    ),
)
def test_values_by_pattern_are_those_that_peft_finds(module, keys):
    by_pattern = {key: index for index, key in enumerate(keys)}

    try:
        expected = by_pattern.get(get_pattern_key(by_pattern.keys(), module), -1)
    except re.error:  # a flag that is not at the start
        with pytest.raises(AdapterFaultError):
            find_value(by_pattern, module, -1, PatternMatcher())
        return

    assert find_value(by_pattern, module, -1, PatternMatcher()) == expected


def test_all_linear_leaves_out_tables_the_head_and_norms():
    model = make_facts(
        [
            ModuleShape(name="embed", num_inputs=9, num_outputs=4, is_embedding=True),
            ModuleShape(name="h.0.q", num_inputs=4, num_outputs=4),
            ModuleShape(name="h.0.norm", num_inputs=4, num_outputs=4, is_norm=True),
            ModuleShape(name="head", num_inputs=4, num_outputs=9),
        ],
        output_head="head",
    )

    assert selected(TargetRules(targets="All-Linear"), model) == {"h.0.q"}
    assert selected(TargetRules(targets=r".*"), model) == {"embed", "h.0.q", "head"}


def test_names_that_mean_nothing_are_told():
    rules = TargetRules(targets=frozenset(["q", "h.0.q", "typo", "0"]))

    assert rules.unmatched(facts(["h.0.q", "h.0.v"])) == ("0", "typo")
    assert TargetRules(targets=r"x.*").unmatched(facts(["h.0.q"])) == ()


def test_no_match_at_all_is_a_fault():
    with pytest.raises(AdapterFaultError, match="match no module of this model"):
        TargetRules(targets=frozenset(["x"])).select(facts(["h.0.q"]), PatternMatcher())
