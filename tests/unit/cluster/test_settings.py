from pathlib import Path

import pytest

from cluster.settings import make_child_environment, read_settings
from models.errors import ConfigError


def test_the_cache_folder_is_the_named_one(tmp_path: Path) -> None:
    settings = read_settings({"MEDLEY_CACHE_DIR": str(tmp_path / "new")})

    assert settings.cache_folder == tmp_path / "new"


def test_the_cache_folder_follows_the_xdg_variable() -> None:
    assert read_settings({"XDG_CACHE_HOME": "/x"}).cache_folder == Path("/x/medley")


def test_without_variables_the_cache_folder_is_in_the_home_folder() -> None:
    assert read_settings({}).cache_folder == Path.home() / ".cache" / "medley"


@pytest.mark.parametrize("value", ["", "relative/folder"])
def test_a_cache_folder_that_is_not_absolute_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigError, match=f"MEDLEY_CACHE_DIR: '{value}' is not an absolute path"):
        read_settings({"MEDLEY_CACHE_DIR": value})


def test_a_cache_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(ConfigError, match="is not a folder"):
        read_settings({"MEDLEY_CACHE_DIR": str(file)})


def test_the_child_gets_the_variables_and_sends_no_usage_reports() -> None:
    child = make_child_environment({"A": "1", "RAY_USAGE_STATS_ENABLED": "1"})

    assert child == {"A": "1", "RAY_USAGE_STATS_ENABLED": "0"}
