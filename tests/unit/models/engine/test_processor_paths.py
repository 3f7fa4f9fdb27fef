"""Logits processors that the configuration names by dotted path."""

import sys

import pytest

from models.config import EngineConfig
from models.engine.build import build_engine, load_processors
from models.errors import ConfigError
from tests.unit.sampling.example_processors import Flatten, OnlyEvenTokens

EXAMPLES = "tests.unit.sampling.example_processors"


def test_processors_come_in_the_order_of_their_paths():
    processors = load_processors([f"{EXAMPLES}:Flatten", f"{EXAMPLES}:OnlyEvenTokens"])

    assert [type(processor) for processor in processors] == [Flatten, OnlyEvenTokens]


@pytest.mark.parametrize(
    "path", [f"{EXAMPLES}:Absent", f"{EXAMPLES}:NeedsAnArgument", f"{EXAMPLES}:NotAProcessor"]
)
def test_a_bad_path_stops_the_start_with_one_message_before_a_model_is_loaded(path, tmp_path):
    told = []

    with pytest.raises(ConfigError) as caught:
        build_engine(
            EngineConfig(logits_processors=(path,)), cache_folder=tmp_path, progress=told.append
        )

    assert caught.value.field == "logits_processors"
    assert path in str(caught.value)
    assert told == []


def test_a_module_that_fails_is_named_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "broken_processors.py").write_text("raise RuntimeError('no such device')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_processors", raising=False)

    with pytest.raises(ConfigError, match=r"broken_processors:One.*no such device"):
        load_processors(["broken_processors:One"])
