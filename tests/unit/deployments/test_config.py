"""The edge configuration and its bridge."""

import dataclasses

import pytest
import yaml
from pydantic import ValidationError

from deployments.config import ModelEntry, ServiceConfig
from models.config import (
    AdapterConfig,
    EngineConfig,
    KVCacheConfig,
    ModelConfig,
    SchedulerConfig,
)
from models.errors import ConfigError

# (part of the core configuration, its field) -> the flat field, where the names differ
RENAMED = {
    ("model", "path"): "model",
    ("model", "is_batch_invariant"): "batch_invariant",
    ("kv_cache", "budget_bytes"): "kv_budget_bytes",
    ("adapters", "path"): "adapters",
    ("adapters", "max_rank"): "max_adapter_rank",
    ("adapters", "max_num_slots"): "max_num_adapter_slots",
    ("adapters", "device_budget_bytes"): "adapter_device_budget_bytes",
    ("adapters", "host_budget_bytes"): "adapter_host_budget_bytes",
    ("adapters", "max_slot_wait_s"): "max_adapter_wait_s",
    ("adapters", "check_interval_s"): "adapter_check_interval_s",
    ("adapters", "download_budget_bytes"): "adapter_download_budget_bytes",
    ("adapters", "is_hub_allowed"): "allow_hub_adapters",
    ("adapters", "hub_revision"): "hub_adapter_revision",
    ("adapters", "max_num_metered"): "max_num_metered_adapters",
}
PARTS = {
    "model": ModelConfig,
    "kv_cache": KVCacheConfig,
    "scheduler": SchedulerConfig,
    "adapters": AdapterConfig,
}
CORE_FIELDS = [
    *((part, field.name) for part, kind in PARTS.items() for field in dataclasses.fields(kind)),
    ("", "default_max_tokens"),
    ("", "logits_processors"),
]
# a value for each that is not its default
OTHER_VALUES = {
    "model": "/models/mine",
    "model_id": "mine",
    "device": "cuda:1",
    "dtype": "float32",
    "max_model_len_tokens": 99,
    "num_threads": 3,
    "chat_template": "{{ messages }}",
    "attention_backend": "reference",
    "batch_invariant": True,
    "kv_budget_bytes": 12345,
    "block_size_tokens": 8,
    "is_prefix_caching_enabled": False,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 77,
    "max_num_waiting": 6,
    "max_num_choices": 4,
    "adapters": "/adapters",
    "max_adapter_rank": 8,
    "max_num_adapter_slots": 2,
    "adapter_device_budget_bytes": 111,
    "adapter_host_budget_bytes": 222,
    "max_adapter_wait_s": 1.5,
    "max_virtual_tokens": 9,
    "adapter_check_interval_s": 2.5,
    "adapter_download_budget_bytes": 333,
    "allow_hub_adapters": True,
    "hub_adapter_revision": "v2",
    "max_num_metered_adapters": 4,
    "default_max_tokens": 11,
    "logits_processors": ("mine:One", "mine:Two"),
}


def read_core(config, part, name):
    return getattr(getattr(config, part) if part else config, name)


def test_no_argument_at_all_is_a_configuration():
    config = ServiceConfig()

    config.check()
    assert config.to_engine_config() == EngineConfig()
    assert config.model_ids == (EngineConfig().model.model_id,)


@pytest.mark.parametrize(("part", "name"), CORE_FIELDS)
def test_every_field_of_the_engine_crosses_the_bridge(part, name):
    flat = RENAMED.get((part, name), name)
    config = ServiceConfig(**{flat: OTHER_VALUES[flat]})

    assert read_core(config.to_engine_config(), part, name) == OTHER_VALUES[flat]
    assert read_core(EngineConfig(), part, name) == ModelEntry.model_fields[flat].default


def test_every_value_of_the_test_above_differs_from_its_default():
    for flat, value in OTHER_VALUES.items():
        assert ModelEntry.model_fields[flat].default != value


def test_strings_of_a_command_line_become_numbers():
    config = ServiceConfig.model_validate({"replicas": "2", "num_cpus": "0.25", "device": "cpu"})

    assert (config.replicas, config.num_cpus) == (2, 0.25)


@pytest.mark.parametrize(
    ("text", "paths"),
    [("a.b:C", ("a.b:C",)), ("a:B, c:D", ("a:B", "c:D")), ("", ())],
)
def test_a_command_line_names_processors_with_commas(text, paths):
    config = ServiceConfig.model_validate({"logits_processors": text})

    assert config.to_engine_config().logits_processors == paths


@pytest.mark.parametrize(
    "arguments",
    [
        {"modle": "x"},
        {"replicas": 0},
        {"replicas": "many"},
        {"max_replicas": 2, "replicas": 2},
        {"max_replicas": 2, "min_replicas": 3},
        {"min_replicas": 1},
        {"keepalive_s": 0},
        {"shutdown_grace_s": float("inf")},
        {"request_timeout_s": -1},
        {"models": [{"modle": "x"}]},
        {"models": [{}], "device": "cpu"},
        {"models": [{"models": []}]},
    ],
)
def test_what_cannot_be_meant_is_refused(arguments):
    with pytest.raises(ValidationError):
        ServiceConfig.model_validate(arguments)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"dtype": "int3"}, "dtype"),
        ({"logits_processors": ["mine.One"]}, "logits_processors"),
        ({"logits_processors": [":One"]}, "logits_processors"),
        ({"logits_processors": ["mine:"]}, "logits_processors"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_adapter_rank": 0}, "max_adapter_rank"),
        ({"max_num_adapter_slots": 0}, "max_num_adapter_slots"),
        ({"adapter_device_budget_bytes": 0}, "adapter_device_budget_bytes"),
        ({"adapter_host_budget_bytes": 0}, "adapter_host_budget_bytes"),
        ({"max_adapter_wait_s": 0}, "max_adapter_wait_s"),
        ({"admin_key": "two words"}, "admin_key"),
        ({"admin_key": "schlüssel"}, "admin_key"),
        ({"models": [{"model_id": "a"}, {"model_id": "a"}]}, "model_id"),
        ({"models": [{}, {}]}, "model_id"),
    ],
)
def test_what_cannot_be_served_is_a_config_error(arguments, field):
    with pytest.raises(ConfigError) as caught:
        ServiceConfig.model_validate(arguments).check()

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("arguments", "model_id"),
    [
        ({"model": "/models/mine"}, "mine"),
        ({"model": "/models/mine/"}, "mine"),
        ({"model": "org/name"}, "name"),
        ({"model": "/models/mine", "model_id": "yours"}, "yours"),
        ({"model": ""}, EngineConfig().model.model_id),
    ],
)
def test_a_model_of_ones_own_never_bears_the_name_of_the_bundled_one(arguments, model_id):
    assert ServiceConfig.model_validate(arguments).model_ids == (model_id,)


def test_a_file_may_name_several_models_each_with_its_own_replicas():
    text = """
    max_body_bytes: 1000
    models:
      - {model_id: small, replicas: 2}
      - {model: /models/large, device: cuda, min_replicas: 0, max_replicas: 4}
    """
    config = ServiceConfig.model_validate(yaml.safe_load(text))

    small, large = config.entries
    config.check()
    assert config.model_ids == ("small", "large")
    assert (small.is_scaling, small.replicas, small.is_on_cpu) == (False, 2, True)
    assert (large.is_scaling, large.min_replicas, large.max_replicas) == (True, 0, 4)


def test_a_configuration_cannot_be_written_to():
    with pytest.raises(ValidationError):
        ServiceConfig().replicas = 3


@pytest.mark.parametrize(
    "arguments",
    [
        {"admin_key": "s3cret s3cret"},
        {"admin_key": ["s3cret"]},
        {"admin_kye": "s3cret"},
        {"admin_key": "s3cret", "replicas": 0},
        {"admin_key": "s3cret", "dtype": "int3"},
    ],
)
def test_the_admin_key_is_in_no_complaint_about_a_configuration(arguments):
    with pytest.raises((ValidationError, ConfigError)) as caught:
        ServiceConfig.model_validate(arguments).check()

    assert "s3cret" not in str(caught.value) + repr(caught.value)


def test_the_admin_key_is_not_shown_with_the_configuration():
    config = ServiceConfig(admin_key="s3cret")

    config.check()
    assert "s3cret" not in f"{config!r} {config} {config.model_dump_json()}"
    assert config.admin_key.get_secret_value() == "s3cret"
