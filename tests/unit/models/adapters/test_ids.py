"""Tests of the grammar of adapter ids."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.adapters.ids import check_adapter_id, is_adapter_id
from models.errors import InvalidAdapterIdError

ABUSE = [
    "",
    "../x",
    "/etc/x",
    "a/../../x",
    "a/..",
    "a/../b",
    "./a",
    "a/.",
    ".",
    "..",
    "...",
    ".hidden",
    "a/.hidden",
    "a%2f..",
    "a%2Fb",
    "a\\..\\b",
    "a\\b",
    "a\0b",
    "a\0",
    "C:\\x",
    "C:x",
    "base:adapter",
    "s3://bucket/x",
    "file:///etc/passwd",
    "~root",
    "$HOME",
    "a/b/c",
    "a//b",
    "a/",
    "/",
    "a ",
    " a",
    "a\n",
    "a\r\nb",
    "a\tb",
    "-a",
    "a/-b",
    "\u00e9",
    "\uff0e\uff0e/x",
    "\u2025/x",
    "\u0661",
    "a\u200bb",
    "\ud800",
    "a" * 97,
    "b/" + "a" * 97,
    "a" * 4000,
    "a/" * 2000,
]


def shown(adapter_id):
    """A short name for a test."""
    return ascii(adapter_id[:20])


@pytest.mark.parametrize("adapter_id", ABUSE, ids=shown)
def test_what_could_lead_elsewhere_is_refused(adapter_id):
    with pytest.raises(InvalidAdapterIdError) as caught:
        check_adapter_id(adapter_id)

    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "adapter_id",
    [
        "a",
        "_",
        "0",
        "Pirate-2",
        "a.b",
        "a..",
        "org/name",
        "org/v1.0_x-y",
        "a" * 96 + "/" + "b" * 96,
    ],
)
def test_one_or_two_plain_names_are_ids(adapter_id):
    check_adapter_id(adapter_id)


@given(st.text(alphabet="aZ09_.-/:\\ \n\0\u00e9", max_size=8))
def test_an_id_is_a_relative_path_of_one_or_two_names_that_hide_nothing(text):
    names = text.split("/")
    is_plain = all(name and name[0] not in ".-" and set(name) <= set("aZ09_.-") for name in names)

    assert is_adapter_id(text) == (is_plain and len(names) <= 2)


def test_ids_sources_and_ledgers_load_no_torch():
    code = (
        "import sys, models.adapters.ids, models.adapters.ledger, models.adapters.folder_source, "
        "models.adapters.catalogue; assert 'torch' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
