"""Tests of several sources in a row."""

import pytest

from models.adapters.folder_source import FolderSource
from models.adapters.source_chain import SourceChain
from models.errors import AdapterLoadFailedError, AdapterNotFoundError
from tests.fakes import FakeClock
from tests.unit.models.adapters.files import write_adapter


@pytest.fixture
def roots(tmp_path):
    return tmp_path / "first", tmp_path / "second"


@pytest.fixture
def chain(roots):
    clock = FakeClock()
    chain = SourceChain([FolderSource(root, clock) for root in roots])
    yield chain
    chain.close()


def test_the_first_source_that_has_an_adapter_gives_it(chain, roots):
    write_adapter(roots[0], "both", b"first")
    write_adapter(roots[1], "both", b"second")
    write_adapter(roots[1], "late", b"second")

    assert chain.find("both").folder.parent.name == "first"
    assert chain.find("late").folder.parent.name == "second"
    assert chain.recall("both") == chain.find("both")
    assert chain.recall("late") == chain.find("late")
    assert chain.list_ids() == ("both", "late")


def test_what_none_has_is_not_found(chain):
    with pytest.raises(AdapterNotFoundError):
        chain.find("none")
    assert chain.recall("none") is None


def test_an_adapter_that_cannot_be_read_is_not_looked_for_in_the_next_source(chain, roots):
    folder = write_adapter(roots[0], "a")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    write_adapter(roots[1], "a")

    with pytest.raises(AdapterLoadFailedError):
        chain.find("a")


def test_forgetting_and_closing_reach_every_source(chain, roots):
    write_adapter(roots[1], "a")
    chain.find("a")

    chain.forget("a")

    assert chain.recall("a") is None
    chain.close()
    chain.close()
