from pathlib import Path

import pytest
from ray.serve.schema import ServeDeploySchema

from cluster.serve_config import BUILDER_PATH, check_serve_config
from models.errors import ConfigError

_FOLDER = Path(__file__).parents[2] / "cluster" / "configs"
_FILES = sorted(_FOLDER.glob("*.yaml"))


def test_there_is_a_file_for_a_small_machine_for_gpus_and_for_several_models() -> None:
    assert {file.stem for file in _FILES} >= {"local", "gpu", "multi_model"}


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
def test_a_shipped_file_is_valid_and_its_application_is_called_medley(file: Path) -> None:
    configs = check_serve_config(file)

    assert list(configs) == ["medley"]


def test_the_local_file_serves_what_the_command_serves_by_default() -> None:
    from deployments.config import ServiceConfig

    config = check_serve_config(_FOLDER / "local.yaml")["medley"]

    assert config == ServiceConfig()


def _write(folder: Path, text: str) -> Path:
    file = folder / "config.yaml"
    file.write_text(text)
    return file


def test_a_misspelt_argument_is_refused_by_name(tmp_path: Path) -> None:
    file = _write(
        tmp_path,
        f"applications:\n  - {{name: medley, import_path: {BUILDER_PATH}, args: {{modle: x}}}}\n",
    )

    with pytest.raises(ConfigError, match=r"application 'medley': unknown argument 'modle'"):
        check_serve_config(file)


def test_a_file_that_serve_itself_refuses_is_refused(tmp_path: Path) -> None:
    file = _write(tmp_path, "applications: 3\n")

    with pytest.raises(ConfigError, match="applications: "):
        check_serve_config(file)


def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        check_serve_config(_write(tmp_path, "a: [1\n"))


def test_a_file_without_an_application_of_ours_is_refused(tmp_path: Path) -> None:
    file = _write(tmp_path, "applications:\n  - {name: other, import_path: 'a:b'}\n")

    with pytest.raises(ConfigError, match="no application has the import_path"):
        check_serve_config(file)


def test_the_files_say_nothing_that_serve_does_not_know() -> None:
    # Serve's schema ignores unknown keys at the top, so a misspelt one would be lost.
    import yaml

    for file in _FILES:
        content = yaml.safe_load(file.read_text())
        assert set(content) <= set(ServeDeploySchema.model_fields)
