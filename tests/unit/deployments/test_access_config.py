"""From the configuration to who may ask."""

import pytest
from pydantic import ValidationError

from deployments.app import build_app
from deployments.config import ServiceConfig
from models.errors import ConfigError
from tests.unit.deployments.access_setup import record


def test_by_default_everybody_may_ask_but_no_web_page():
    config = ServiceConfig()

    assert config.api_keys_file == ""
    assert config.cors_origins == ()


def test_origins_of_a_command_line_stand_between_commas():
    config = ServiceConfig(cors_origins="https://a.example, http://localhost:3000")

    assert config.cors_origins == ("https://a.example", "http://localhost:3000")


@pytest.mark.parametrize(
    "origin", ["a.example", "https://a.example/", "https://a.example/x", "ftp://a", "https://*.a"]
)
def test_what_no_browser_sends_as_an_origin_is_refused(origin):
    with pytest.raises(ValidationError, match="an origin is"):
        ServiceConfig(cors_origins=[origin])


@pytest.mark.parametrize("text", [None, "", "- name: a\n  sha256: my-secret-key\n"])
def test_a_broken_keys_file_stops_the_start_in_words(tmp_path, text):
    path = tmp_path / "keys.yaml"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match="api_keys_file: ") as caught:
        build_app(ServiceConfig(api_keys_file=str(path)))

    assert "my-secret-key" not in str(caught.value)


def test_a_good_keys_file_reaches_the_ingress_by_its_path_and_not_by_its_keys(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(f"[{record('alice')}]")

    app = build_app(ServiceConfig(api_keys_file=str(path), cors_origins=["*"]))

    access = app._bound_deployment.init_kwargs["access"]
    assert access.keys_path == path
    assert access.cors_origins == ("*",)
    assert access.default_max_tokens == {ServiceConfig().model_id: 512}
