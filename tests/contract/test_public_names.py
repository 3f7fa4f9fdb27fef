"""The names that users write: they do not change without a word in the changelog."""

import inspect

from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

from deployments.app import build_app
from deployments.config import ServiceConfig
from deployments.ingress import Ingress
from sampling.params import derive_seed

BUILDER_ARGUMENTS = {
    "adapter_check_interval_s",
    "adapter_device_budget_bytes",
    "adapter_download_budget_bytes",
    "adapter_host_budget_bytes",
    "adapters",
    "admin_key",
    "allow_hub_adapters",
    "allow_request_chat_template",
    "api_keys_file",
    "attention_backend",
    "batch_invariant",
    "block_size_tokens",
    "cache_folder",
    "chat_template",
    "cors_origins",
    "default_max_tokens",
    "device",
    "downscale_delay_s",
    "dtype",
    "header_wait_s",
    "hub_adapter_revision",
    "ingress_num_cpus",
    "ingress_replicas",
    "is_prefix_caching_enabled",
    "keepalive_s",
    "kv_budget_bytes",
    "logits_processors",
    "max_adapter_rank",
    "max_adapter_wait_s",
    "max_body_bytes",
    "max_json_depth",
    "max_logit_biases",
    "max_messages",
    "max_metadata_pairs",
    "max_model_len_tokens",
    "max_num_adapter_slots",
    "max_num_batched_tokens",
    "max_num_choices",
    "max_num_metered_adapters",
    "max_num_seqs",
    "max_num_waiting",
    "max_replicas",
    "max_request_tokens",
    "max_stop_characters",
    "max_stop_strings",
    "max_virtual_tokens",
    "min_replicas",
    "model",
    "model_id",
    "models",
    "num_cpus",
    "num_gpus",
    "num_threads",
    "prompt_log_folder",
    "prompt_log_max_bytes",
    "prompt_log_num_kept",
    "prompt_logprobs_budget_bytes",
    "replicas",
    "request_timeout_s",
    "shutdown_grace_s",
    "target_ongoing_requests",
    "validation_status",
    "upscale_delay_s",
}


def test_serve_makes_the_configuration_of_the_arguments_of_a_command_line():
    app = call_user_app_builder_with_args_if_necessary(
        build_app, {"model_id": "x", "replicas": "2"}
    )

    _, models = app._bound_deployment.init_args
    assert models["x"]._bound_deployment.num_replicas == 2


def test_the_arguments_of_the_builder_are_the_documented_ones():
    assert set(ServiceConfig.model_fields) == BUILDER_ARGUMENTS


def test_every_argument_of_the_builder_has_a_default():
    assert not [name for name, field in ServiceConfig.model_fields.items() if field.is_required()]


def test_the_handle_has_its_methods():
    for name in ("chat", "complete"):
        assert inspect.iscoroutinefunction(getattr(Ingress, name))
        assert list(inspect.signature(getattr(Ingress, name)).parameters) == ["self", "body"]
    for name in ("stream_chat", "stream_complete"):
        assert inspect.isasyncgenfunction(getattr(Ingress, name))
        assert list(inspect.signature(getattr(Ingress, name)).parameters) == ["self", "body"]


def test_seeds_of_choices_are_derived_as_documented():
    assert derive_seed(7, 0) == 7
    assert [derive_seed(0, choice) for choice in range(1, 4)] == [
        -2152535657050944081,
        7960286522194355700,
        487617019471545679,
    ]
