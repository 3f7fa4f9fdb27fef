"""What the builder makes of a configuration. Starts nothing."""

import json
from pathlib import Path

import pytest
from ray import cloudpickle

from deployments.admin_key import AdminKey
from deployments.app import build_app, make_deployment_name
from deployments.config import ServiceConfig
from deployments.prompt_log import PromptLogConfig
from models.errors import ConfigError


def built(**arguments):
    """The ingress's deployment and, by model id, the models' deployments."""
    app = build_app(ServiceConfig.model_validate(arguments))
    ingress = app._bound_deployment
    limits, models = ingress.init_args
    return ingress, limits, {name: bound._bound_deployment for name, bound in models.items()}


def test_the_bundled_model_is_served_without_arguments():
    ingress, limits, models = built()

    (model,) = models.values()
    assert ingress.name == "Ingress"
    assert model.name == "model-smollm2-135m-instruct"
    assert model.num_replicas == 1
    assert ingress.ray_actor_options["num_cpus"] == 0
    assert 0 < model.ray_actor_options["num_cpus"] < 1
    assert limits.probed_model_ids == ("smollm2-135m-instruct",)


def test_each_model_of_several_has_its_own_deployment_and_scaling():
    _, limits, models = built(
        models=[
            {"model_id": "fixed", "replicas": 3, "request_timeout_s": 20},
            {"model_id": "scaled", "min_replicas": 0, "max_replicas": 5, "max_num_seqs": 8},
        ]
    )

    fixed, scaled = models["fixed"], models["scaled"]
    assert fixed.num_replicas == 3
    scaling = scaled._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (0, 5)
    assert scaled.init_args[0].scheduler.max_num_seqs == 8
    assert [model.init_args[2] for model in (fixed, scaled)] == [20.0, 0.0]
    # asking it for its health would keep it from scaling to none
    assert limits.probed_model_ids == ("fixed",)


def test_the_engine_refuses_before_serve_does():
    ingress, _, models = built(max_num_seqs=4, max_num_waiting=7)

    (model,) = models.values()
    assert model.max_ongoing_requests > 4 + 7
    assert ingress.max_ongoing_requests > model.max_ongoing_requests


def test_gpus_are_reserved_on_a_cuda_device_only():
    _, _, models = built(
        models=[{"model_id": "a"}, {"model_id": "b", "device": "cuda", "num_gpus": 0.5}]
    )

    assert models["a"].ray_actor_options["num_gpus"] == 0
    assert models["b"].ray_actor_options["num_gpus"] == 0.5


def test_an_ingress_outlives_the_models_that_are_killed_behind_their_grace_time():
    ingress, _, models = built(shutdown_grace_s=7)

    (model,) = models.values()
    assert model._deployment_config.graceful_shutdown_timeout_s == 7
    assert ingress._deployment_config.graceful_shutdown_timeout_s > 7


def test_names_of_deployments_differ_whenever_the_models_do():
    model_ids = ["a", "A", "a b", "a/b", "a-b", "ü", "ö"]

    names = [make_deployment_name(model_id) for model_id in model_ids]

    assert len(set(names)) == len(model_ids)
    assert all(name.isascii() and "/" not in name and "#" not in name for name in names)


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "nothing.gguf"])
def test_a_model_path_that_does_not_exist_stops_the_build_with_a_sentence(model):
    with pytest.raises(ConfigError) as caught:
        built(model=model)

    assert caught.value.field == "model"
    assert model in str(caught.value)


def test_a_folder_that_holds_no_causal_model_stops_the_build(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bert", "architectures": ["BertModel"]})
    )

    with pytest.raises(ConfigError, match="BertModel"):
        built(model=str(tmp_path))


def test_models_on_the_cpu_must_fit_into_memory_together(tmp_path, monkeypatch):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(weights)
    monkeypatch.setattr("deployments.app.available_host_memory_bytes", lambda: 100 << 20)

    def entry(model_id, **fields):
        budget = {"kv_budget_bytes": 60 << 20}
        return {"model": str(tmp_path), "model_id": model_id, **budget, **fields}

    built(models=[entry("a"), entry("b", device="cuda")])
    with pytest.raises(ConfigError, match="GiB are available"):
        built(models=[entry("a"), entry("b")])
    with pytest.raises(ConfigError, match="GiB are available"):
        built(models=[entry("a", replicas=2)])


def test_a_hub_id_is_left_to_the_replica():
    _, _, models = built(model="some-org/some-model")

    assert models["some-model"].init_args[0].model.path == "some-org/some-model"


def test_a_folder_of_adapters_that_does_not_exist_stops_the_build_with_a_sentence(tmp_path):
    for folder in (f"{tmp_path}/none", f"file://{tmp_path}/none"):
        with pytest.raises(ConfigError) as caught:
            built(adapters=folder)

        assert caught.value.field == "adapters"
        assert folder in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "hint"), [("nowhere://key:secret@bucket", "nowhere"), ("dropbox://a", "dropbox")]
)
def test_a_url_of_adapters_without_a_library_for_it_stops_the_build_with_a_sentence(url, hint):
    with pytest.raises(ConfigError) as caught:
        built(adapters=url)

    assert caught.value.field == "adapters"
    assert hint in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_url_or_the_hub_makes_a_model_one_with_adapters():
    _, limits, _ = built(
        models=[
            {"model_id": "url", "adapters": "memory://adapters"},
            {"model_id": "hub", "allow_hub_adapters": True},
            {"model_id": "none"},
        ]
    )

    assert limits.adapter_model_ids == ("url", "hub")


def test_models_with_a_folder_of_adapters_are_known_to_the_ingress(tmp_path):
    _, limits, models = built(
        models=[{"model_id": "with", "adapters": str(tmp_path)}, {"model_id": "without"}]
    )

    assert limits.adapter_model_ids == ("with",)
    assert models["with"].init_args[0].adapters.path == str(tmp_path)


def test_the_ingress_gets_no_admin_key_but_its_digest():
    ingress, _, _ = built(admin_key="s3cret")
    without, _, _ = built()

    assert ingress.init_kwargs["admin_key"] == AdminKey.of("s3cret")
    assert b"s3cret" not in cloudpickle.dumps(ingress.init_kwargs)
    assert without.init_kwargs["admin_key"] is None


def test_the_prompt_log_lies_in_the_cache_folder_unless_it_is_told_another():
    default, _, _ = built(cache_folder="/c")
    own, _, _ = built(prompt_log_folder="/p", prompt_log_max_bytes=5, prompt_log_num_kept=0)

    assert default.init_kwargs["prompt_log"].folder == Path("/c/request_log")
    assert own.init_kwargs["prompt_log"] == PromptLogConfig(
        folder=Path("/p"), max_bytes=5, num_kept=0
    )
