"""Checks a Serve config file before it touches a cluster.

Does not start anything. The same files go to ``serve run``, ``serve deploy`` and a RayService.
"""

from __future__ import annotations

from pathlib import Path

import pydantic
import yaml

from cluster.arguments import describe_problems
from deployments.config import ServiceConfig
from models.errors import ConfigError

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
    # Serve's schemas take seconds to import.
    from ray.serve.schema import ServeDeploySchema

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(str(path), str(error)) from error
    try:
        schema = ServeDeploySchema.model_validate(content)
    except pydantic.ValidationError as error:
        raise ConfigError(str(path), describe_problems(error)) from error
    configs = {}
    for application in schema.applications:
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
