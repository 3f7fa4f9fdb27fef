"""Wires the Serve application: one ingress, one deployment per model. Loads no torch.

``serve run --name medley deployments.app:build_app model=... model_id=...``
"""

# No ``from __future__ import annotations``: Serve reads the builder's annotation as it stands.

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig

from deployments.access import AccessConfig
from deployments.admin_key import AdminKey
from deployments.config import ModelEntry, ServiceConfig
from deployments.ingress import Ingress
from deployments.key_file import read_keys
from deployments.model_replica import ModelReplica
from deployments.prompt_log import PromptLogConfig
from deployments.service import ServiceLimits
from models.adapters.fsspec_origin import check_url
from models.adapters.location import local_folder
from models.errors import ConfigError
from models.loading.preflight import (
    available_host_memory_bytes,
    check_model_files,
    locate_model,
)

_HEALTH_CHECK_PERIOD_S = 5.0
_HEALTH_CHECK_TIMEOUT_S = 30.0
# How often a stopping replica looks whether its requests are done.
_DRAIN_POLL_S = 0.5
# A model's replica that outlives its grace time is killed; the ingress needs a moment more, to
# tell its clients so.
_LAST_EVENTS_S = 5.0
# Requests that one ingress replica holds: what its models take, and many that wait to be refused.
_INGRESS_ROOM = 4

# The ingress never blocks, so its code may share a loop with Serve's own. That saves two thread
# switches per message: a seventh of what a streamed message costs the ingress behind Serve's
# Python proxy (where the proxy's own hop weighs more), a third of it behind HAProxy (measured).
_SAME_LOOP = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}

# A compute thread that waits sleeps instead of spinning. A replica on the CPU shares its cores
# with Serve's processes, and a thread that spins keeps the one it waits for from running: with
# both of two cores also in other use, a step took ten times as long (measured).
#
# torch and oneDNN each keep what they compiled for a shape, 0.3 MB of it, until they have met 1,024
# shapes. With these capacities memory comes to rest after 150 requests, 45 MB up; without them it
# was 250 MB up after 400 and still rose (measured).
_CPU_REPLICA = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}


def build_app(args: ServiceConfig) -> serve.Application:
    """Return the application that serves the configured models.

    Args:
        args: Serve makes it of ``key=value`` arguments, or of ``args`` in a config file.

    Raises:
        ConfigError: it cannot be served, in one sentence.
    """
    args.check()
    _check_files(args.entries)
    models = {
        entry.model_id: _model_deployment(entry, args).bind(
            entry.to_engine_config(), args.cache_folder, entry.request_timeout_s
        )
        for entry in args.entries
    }
    limits = ServiceLimits(
        probed_model_ids=tuple(
            entry.model_id
            for entry in args.entries
            if not (entry.is_scaling and entry.min_replicas == 0)
        ),
        adapter_model_ids=tuple(entry.model_id for entry in args.entries if entry.has_adapters),
        max_body_bytes=args.max_body_bytes,
        header_wait_s=args.header_wait_s,
        keepalive_s=args.keepalive_s,
        validation_status=args.validation_status,
        request=args.request_limits,
    )
    secret = args.admin_key.get_secret_value()
    return _ingress_deployment(args).bind(
        limits,
        models,
        admin_key=AdminKey.of(secret) if secret else None,
        prompt_log=PromptLogConfig(
            folder=Path(args.prompt_log_folder or f"{args.cache_folder}/request_log").expanduser(),
            max_bytes=args.prompt_log_max_bytes,
            num_kept=args.prompt_log_num_kept,
        ),
        access=_make_access(args),
    )


def _make_access(args: ServiceConfig) -> AccessConfig:
    """Return who may ask; every ingress replica reads the keys for itself, from the same path."""
    keys_path = None
    if args.api_keys_file:
        keys_path = Path(args.api_keys_file).expanduser().absolute()
        read_keys(keys_path)
    return AccessConfig(
        keys_path=keys_path,
        default_max_tokens={entry.model_id: entry.default_max_tokens for entry in args.entries},
        cors_origins=args.cors_origins,
    )


def make_deployment_name(model_id: str) -> str:
    """Return the name of a model's deployment: readable, and different for every model id."""
    slug = re.sub(r"[^a-z0-9]+", "-", model_id.lower()).strip("-")
    if slug == model_id:
        return f"model-{slug}"
    digest = hashlib.blake2b(model_id.encode(), digest_size=4).hexdigest()
    return f"model-{slug}-{digest}"


def max_replica_requests(entry: ModelEntry) -> int:
    """Return how many requests Serve lets into a replica.

    Generous: the engine has the queue, and refuses in words what is too much for it.
    """
    return 2 * entry.max_num_seqs + entry.max_num_waiting


def _check_files(entries: Sequence[ModelEntry]) -> None:
    """Check what can be checked before anything starts; the bundled model needs no check.

    Models on the CPU share the memory of this machine, as if all of them ran on it.
    """
    available_bytes = available_host_memory_bytes()
    for entry in entries:
        _check_adapter_folder(entry)
        path = locate_model(entry.model) if entry.model else None
        if path is None or path.suffix == ".gguf":
            continue
        num_replicas = max(1, entry.min_replicas if entry.is_scaling else entry.replicas)
        facts = check_model_files(
            path,
            dtype=entry.dtype,
            device=entry.device,
            kv_budget_bytes=entry.kv_budget_bytes,
            available_memory_bytes=(
                available_bytes // num_replicas if entry.is_on_cpu else sys.maxsize
            ),
        )
        if entry.is_on_cpu:
            available_bytes -= num_replicas * (facts.weights_bytes + entry.kv_budget_bytes)


def _check_adapter_folder(entry: ModelEntry) -> None:
    if not entry.adapters:
        return
    folder = local_folder(entry.adapters)
    if folder is None:
        check_url(entry.adapters)
    elif not folder.is_dir():
        raise ConfigError("adapters", f"there is no such folder: '{entry.adapters}'")


def _model_deployment(entry: ModelEntry, args: ServiceConfig) -> serve.Deployment:
    options: dict[str, Any] = {}
    if entry.is_scaling:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=entry.min_replicas,
            max_replicas=entry.max_replicas,
            target_ongoing_requests=entry.target_ongoing_requests,
            upscale_delay_s=entry.upscale_delay_s,
            downscale_delay_s=entry.downscale_delay_s,
        )
    else:
        options["num_replicas"] = entry.replicas
    return serve.deployment(ModelReplica).options(
        name=make_deployment_name(entry.model_id),
        max_ongoing_requests=max_replica_requests(entry),
        max_queued_requests=entry.max_num_waiting,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1.0),
        ray_actor_options={
            "num_cpus": entry.num_cpus,
            "num_gpus": 0.0 if entry.is_on_cpu else entry.num_gpus,
            "runtime_env": {"env_vars": _CPU_REPLICA if entry.is_on_cpu else {}},
        },
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=_HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
        graceful_shutdown_timeout_s=args.shutdown_grace_s,
        **options,
    )


def _ingress_deployment(args: ServiceConfig) -> serve.Deployment:
    room = sum(max_replica_requests(entry) * _most_replicas(entry) for entry in args.entries)
    return serve.deployment(serve.ingress()(Ingress)).options(
        name=Ingress.__name__,
        num_replicas=args.ingress_replicas,
        max_ongoing_requests=_INGRESS_ROOM * room,
        ray_actor_options={
            "num_cpus": args.ingress_num_cpus,
            "runtime_env": {"env_vars": _SAME_LOOP},
        },
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=_HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
        graceful_shutdown_timeout_s=args.shutdown_grace_s + _LAST_EVENTS_S,
    )


def _most_replicas(entry: ModelEntry) -> int:
    return entry.max_replicas if entry.is_scaling else entry.replicas
