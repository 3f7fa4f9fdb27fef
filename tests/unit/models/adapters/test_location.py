"""Tests of what a path of adapters is."""

from pathlib import Path

import pytest

from models.adapters.location import local_folder


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("/data/adapters", Path("/data/adapters")),
        ("adapters", Path("adapters")),
        ("./a:b", Path("a:b")),
        ("file:///data/adapters", Path("/data/adapters")),
        ("local:///data/adapters", Path("/data/adapters")),
        ("~/x", Path.home() / "x"),
        ("file://~/x", Path.home() / "x"),
    ],
)
def test_paths_of_this_machine_are_folders(path, folder):
    assert local_folder(path) == folder


@pytest.mark.parametrize(
    "url", ["s3://bucket/x", "memory://x", "simplecache::s3://bucket", "gs://b", "abfs+x://b"]
)
def test_urls_are_none(url):
    assert local_folder(url) is None
