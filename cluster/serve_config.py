"""Checks a Serve config file before it touches a cluster.

Does not start anything. The same files go to ``serve run``, ``serve deploy`` and a RayService.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pydantic
import yaml

from cluster.arguments import describe_problems
from deployments.config import ServiceConfig
from deployments.open_door import describe_open_door, is_public
from models.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

BUILDER_PATH = "deployments.app:build_app"


def check_serve_config(path: Path) -> dict[str, ServiceConfig]:
    """Read a file and validate it as a whole, and the arguments of each application of ours.

    Args:
        path: a YAML file for ``serve run`` or ``serve deploy``.

    Returns:
        The validated arguments by application name.

    Raises:
        ConfigError: naming the file or the field, and what is wrong with it.
    """
    configs = {}
    for application in _read_schema(path).applications:
        if application.import_path != BUILDER_PATH:
            continue
        try:
            config = ServiceConfig.model_validate(application.args)
            config.check()
        except pydantic.ValidationError as error:
            where = f"{path}, application '{application.name}'"
            raise ConfigError(where, describe_problems(error)) from error
        configs[application.name] = config
    if not configs:
        raise ConfigError(str(path), f"no application has the import_path {BUILDER_PATH}")
    return configs


def find_open_doors(path: Path, configs: Mapping[str, ServiceConfig]) -> list[str]:
    """Return a warning if a file serves a public address and an application has no API keys.

    Args:
        path: the file.
        configs: its applications, as ``check_serve_config`` returned them.

    Raises:
        ConfigError: as ``check_serve_config`` does.
    """
    host = _read_schema(path).http_options.host
    if not is_public(host):
        return []
    return [
        f"{name}: {describe_open_door(host)}"
        for name, config in configs.items()
        if not config.api_keys_file
    ]


def _read_schema(path: Path) -> ServeDeploySchema:
    # Serve's schemas take seconds to import.
    from ray.serve.schema import ServeDeploySchema

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(str(path), str(error)) from error
    try:
        return ServeDeploySchema.model_validate(content)
    except pydantic.ValidationError as error:
        raise ConfigError(str(path), describe_problems(error)) from error
