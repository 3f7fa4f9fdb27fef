"""What the environment says: the only reader of it, and of nothing but addresses and folders.

Does not configure behaviour: that is ``deployments.config``. Values read here reach others as
arguments.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from models.errors import ConfigError

CACHE_FOLDER_VARIABLE = "MEDLEY_CACHE_DIR"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The environment's part of a start.

    Attributes:
        cache_folder: where converted models are kept; made when first needed.
    """

    cache_folder: Path


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings.

    Args:
        environment: variables by name.

    Raises:
        ConfigError: naming the variable whose value cannot be used.
    """
    named = environment.get(CACHE_FOLDER_VARIABLE)
    if named is None:
        base = environment.get("XDG_CACHE_HOME") or "~/.cache"
        return Settings(cache_folder=Path(base).expanduser() / "medley")
    folder = Path(named).expanduser()
    if not named or not folder.is_absolute():
        raise ConfigError(CACHE_FOLDER_VARIABLE, f"'{named}' is not an absolute path")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(CACHE_FOLDER_VARIABLE, f"'{named}' is not a folder")
    return Settings(cache_folder=folder)


def make_child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for the process that starts Ray: the own ones, no usage reports.

    Args:
        environment: variables by name.
    """
    return {**environment, "RAY_USAGE_STATS_ENABLED": "0"}
