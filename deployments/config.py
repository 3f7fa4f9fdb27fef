"""The service's configuration as people and YAML write it, and its one bridge to the engine's.

Reads no files and no environment. Defaults of the engine are taken from ``models.config``, so
that none is written twice.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from deployments.limits import RequestLimits
from models.config import (
    AdapterConfig,
    EngineConfig,
    KVCacheConfig,
    ModelConfig,
    SchedulerConfig,
)
from models.errors import ConfigError

_ENGINE = EngineConfig()
_LIMITS = RequestLimits()
_MODEL = _ENGINE.model
_KV_CACHE = _ENGINE.kv_cache
_SCHEDULER = _ENGINE.scheduler
_ADAPTERS = _ENGINE.adapters

# What a header can carry.
_KEY = re.compile(r"[!-~]*")

# What a browser calls the origin of a page: no path, no slash at the end.
_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.\-\[\]:]+")

AtLeastZero = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ModelEntry(BaseModel):
    """One served model: its weights, its engine, and how many replicas of it.

    Attributes:
        model: folder of a transformers model, a ``.gguf`` file, a hub id, or "" (the bundled one).
        model_id: the name that requests use; without one, the last part of ``model``.
        device: "cpu", "cuda" or "cuda:<index>".
        dtype: "bfloat16", "float16" or "float32".
        adapters: folder with one PEFT folder per adapter, or a URL of one that fsspec reads
            (s3://, gs://, ...); "" serves the base model alone.
        max_adapter_rank: largest rank of an adapter that is served.
        max_virtual_tokens: most tokens that an adapter of the prompt tuning kind may put before
            every prompt; they count against the window.
        max_num_adapter_slots: most adapters that are resident on one replica's device.
        adapter_device_budget_bytes: most bytes of the resident ones.
        adapter_host_budget_bytes: most bytes of those in a replica's memory, resident ones
            included.
        max_adapter_wait_s: most seconds that a request waits for room for its adapter.
        adapter_check_interval_s: seconds in which a URL or the hub is asked once per adapter
            whether its files have changed.
        adapter_download_budget_bytes: most bytes of downloaded adapters on a machine's disk.
        allow_hub_adapters: requests may name any adapter of the Hugging Face hub ("owner/name")
            that a replica can read: with the token of its environment private ones too.
        hub_adapter_revision: branch, tag or commit of those; "" takes their default branch.
        max_num_metered_adapters: most adapters with metrics of their own in one replica.
        max_model_len_tokens: upper bound on prompt plus output; 0 takes the model's own window.
        num_threads: compute threads on the CPU; 0 takes every core that the process may use.
        chat_template: Jinja text that replaces the model's own template; "" keeps it.
        attention_backend: "matmul", "varlen" (CUDA, half precision), "reference" (slow), or
            "auto": the fastest that the device and the model allow.
        batch_invariant: on a GPU, give every request the same bits in any company, at a cost in
            speed; changes nothing on the CPU.
        kv_budget_bytes: bytes for the KV pool of one replica.
        block_size_tokens: tokens of one KV block; with "varlen", the next multiple of 256.
        is_prefix_caching_enabled: keep the KV of finished requests for later ones.
        max_num_seqs: most sequences that run at the same time in one replica.
        max_num_batched_tokens: most tokens of one step.
        max_num_waiting: most requests that wait in one replica; one more is refused.
        max_num_choices: most choices (``n``) of one request.
        prompt_logprobs_budget_bytes: bytes that the logits of one step may take for log
            probabilities of prompts; less memory means more steps.
        default_max_tokens: new tokens when a request names no limit.
        logits_processors: ``package.module:Name`` of further ``sampling.processors``, run in this
            order after the built-in ones; on a command line with commas between them. A replica
            must be able to import them.
        request_timeout_s: seconds that a request without a ``timeout_s`` of its own has from its
            arrival at a replica; 0 sets no limit.
        replicas: number of replicas while ``max_replicas`` is 0.
        min_replicas: fewest replicas when the number scales; 0 lets an idle model go.
        max_replicas: most replicas when the number scales; 0 fixes it at ``replicas``.
        target_ongoing_requests: load per replica that scaling aims at.
        upscale_delay_s: seconds of higher load before replicas are added.
        downscale_delay_s: seconds of lower load before replicas are taken away.
        num_cpus: CPUs that Ray reserves for a replica; a fraction lets several share a core.
        num_gpus: GPUs that Ray reserves for a replica on a CUDA device; unused on the CPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = _MODEL.path
    model_id: str = _MODEL.model_id
    device: str = _MODEL.device
    dtype: str = _MODEL.dtype
    adapters: str = _ADAPTERS.path
    max_adapter_rank: int = _ADAPTERS.max_rank
    max_virtual_tokens: int = _ADAPTERS.max_virtual_tokens
    max_num_adapter_slots: int = _ADAPTERS.max_num_slots
    adapter_device_budget_bytes: int = _ADAPTERS.device_budget_bytes
    adapter_host_budget_bytes: int = _ADAPTERS.host_budget_bytes
    max_adapter_wait_s: Seconds = _ADAPTERS.max_slot_wait_s
    adapter_check_interval_s: Seconds = _ADAPTERS.check_interval_s
    adapter_download_budget_bytes: int = _ADAPTERS.download_budget_bytes
    allow_hub_adapters: bool = _ADAPTERS.is_hub_allowed
    hub_adapter_revision: str = _ADAPTERS.hub_revision
    max_num_metered_adapters: int = _ADAPTERS.max_num_metered
    max_model_len_tokens: int = _MODEL.max_model_len_tokens
    num_threads: int = _MODEL.num_threads
    chat_template: str = _MODEL.chat_template
    attention_backend: str = _MODEL.attention_backend
    batch_invariant: bool = _MODEL.is_batch_invariant
    kv_budget_bytes: int = _KV_CACHE.budget_bytes
    block_size_tokens: int = _KV_CACHE.block_size_tokens
    is_prefix_caching_enabled: bool = _KV_CACHE.is_prefix_caching_enabled
    max_num_seqs: int = _SCHEDULER.max_num_seqs
    max_num_batched_tokens: int = _SCHEDULER.max_num_batched_tokens
    max_num_waiting: int = _SCHEDULER.max_num_waiting
    max_num_choices: int = _SCHEDULER.max_num_choices
    prompt_logprobs_budget_bytes: int = _ENGINE.prompt_logprobs_budget_bytes
    default_max_tokens: int = _ENGINE.default_max_tokens
    logits_processors: tuple[str, ...] = _ENGINE.logits_processors
    request_timeout_s: Seconds = 0.0
    replicas: AtLeastOne = 1
    min_replicas: AtLeastZero = 1
    max_replicas: AtLeastZero = 0
    target_ongoing_requests: AtLeastOne = 16
    upscale_delay_s: Seconds = 10.0
    downscale_delay_s: Seconds = 300.0
    num_cpus: Share = 0.5
    num_gpus: Share = 1.0

    @property
    def is_scaling(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas > 0

    @property
    def has_adapters(self) -> bool:
        """Whether the model can have adapters."""
        return bool(self.adapters) or self.allow_hub_adapters

    @property
    def is_on_cpu(self) -> bool:
        """Whether the model runs on the CPU."""
        return self.device == "cpu"

    @model_validator(mode="before")
    @classmethod
    def _name_model(cls, values: Any) -> Any:
        """Name a model of one's own after its path, never after the bundled one."""
        if isinstance(values, dict) and values.get("model") and "model_id" not in values:
            return {**values, "model_id": PurePath(str(values["model"])).name}
        return values

    @field_validator("logits_processors", mode="before")
    @classmethod
    def _split_paths(cls, value: Any) -> Any:
        """Read the one string of a command line."""
        if isinstance(value, str):
            return tuple(path.strip() for path in value.split(",") if path.strip())
        return value

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if not self.is_scaling:
            if "min_replicas" in self.model_fields_set:
                raise ValueError("min_replicas needs max_replicas; replicas fixes the number")
            return self
        if "replicas" in self.model_fields_set:
            raise ValueError("replicas fixes the number and excludes max_replicas")
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})"
            )
        return self

    def to_engine_config(self) -> EngineConfig:
        """Return the engine's part.

        Raises:
            ConfigError: a value is out of range; ``field`` names it.
        """
        return EngineConfig(
            model=ModelConfig(
                path=self.model,
                model_id=self.model_id,
                device=self.device,
                dtype=self.dtype,
                max_model_len_tokens=self.max_model_len_tokens,
                num_threads=self.num_threads,
                chat_template=self.chat_template,
                attention_backend=self.attention_backend,
                is_batch_invariant=self.batch_invariant,
            ),
            kv_cache=KVCacheConfig(
                budget_bytes=self.kv_budget_bytes,
                block_size_tokens=self.block_size_tokens,
                is_prefix_caching_enabled=self.is_prefix_caching_enabled,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_waiting=self.max_num_waiting,
                max_num_choices=self.max_num_choices,
            ),
            adapters=AdapterConfig(
                path=self.adapters,
                max_rank=self.max_adapter_rank,
                max_virtual_tokens=self.max_virtual_tokens,
                max_num_slots=self.max_num_adapter_slots,
                device_budget_bytes=self.adapter_device_budget_bytes,
                host_budget_bytes=self.adapter_host_budget_bytes,
                max_slot_wait_s=self.max_adapter_wait_s,
                check_interval_s=self.adapter_check_interval_s,
                download_budget_bytes=self.adapter_download_budget_bytes,
                is_hub_allowed=self.allow_hub_adapters,
                hub_revision=self.hub_adapter_revision,
                max_num_metered=self.max_num_metered_adapters,
            ),
            prompt_logprobs_budget_bytes=self.prompt_logprobs_budget_bytes,
            default_max_tokens=self.default_max_tokens,
            logits_processors=self.logits_processors,
        )


class ServiceConfig(ModelEntry):
    """The builder's one argument: flat, a default for everything, so that no argument is needed.

    It is a model entry and the service around it (the one place where a config inherits: a
    builder's arguments on a command line are flat). Several models come as ``models``, which
    then replaces the flat entry.

    Attributes:
        models: entries of several models; () serves the flat one.
        cache_folder: where converted models are kept.
        ingress_replicas: number of HTTP ingress replicas.
        ingress_num_cpus: CPUs that Ray reserves for an ingress replica.
        max_body_bytes: largest request body. A call to a replica travels as one gRPC message,
            which Ray limits to 4 MiB by default.
        validation_status: HTTP status of a request with a wrong value: 400, or OctoAI's 422.
        max_json_depth: objects and lists inside of each other in a request body.
        max_messages: most messages of a chat.
        max_stop_strings: most entries of ``stop``.
        max_stop_characters: most characters of each of them.
        max_logit_biases: most entries of ``logit_bias``.
        max_metadata_pairs: most pairs of ``metadata``.
        allow_request_chat_template: requests may bring a chat template of their own, which is
            rendered in a limited process.
        max_request_tokens: most new tokens of one request: its choices times ``max_tokens``.
        header_wait_s: seconds to wait for a stream's admission before headers go out without it.
        keepalive_s: seconds of silence after which a stream gets a comment.
        shutdown_grace_s: seconds that open requests get to finish when a replica is stopped.
        prompt_log_folder: where requests with ``log_prompt`` are logged, on the machine of each
            ingress replica; "" is "request_log" in ``cache_folder``.
        prompt_log_max_bytes: size of a file of that log at which the next is begun.
        prompt_log_num_kept: older files of that log that each ingress replica keeps.
        api_keys_file: file or folder of the API keys that requests over HTTP need, readable on the
            machine of each ingress replica; see ``deployments.key_file``. "" lets everybody ask.
        cors_origins: web pages that may call from a browser ("https://chat.example.org", or "*");
            on a command line with commas between them. () lets none.
        admin_key: opens the admin routes to who sends it; "" leaves them out. Printable ASCII.
    """

    # What is wrong with a value is told without the value: one of them is secret.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    models: tuple[ModelEntry, ...] = ()
    cache_folder: str = "~/.cache/medley"
    ingress_replicas: AtLeastOne = 1
    ingress_num_cpus: Share = 0.0
    max_body_bytes: AtLeastOne = 2 << 20
    validation_status: Literal[400, 422] = 400
    max_json_depth: AtLeastOne = _LIMITS.max_json_depth
    max_messages: Annotated[int, Field(ge=1, le=_LIMITS.max_messages)] = _LIMITS.max_messages
    max_stop_strings: Annotated[int, Field(ge=0, le=_LIMITS.max_stop_strings)] = (
        _LIMITS.max_stop_strings
    )
    max_stop_characters: Annotated[int, Field(ge=1, le=_LIMITS.max_stop_characters)] = (
        _LIMITS.max_stop_characters
    )
    max_logit_biases: Annotated[int, Field(ge=0, le=_LIMITS.max_logit_biases)] = (
        _LIMITS.max_logit_biases
    )
    max_metadata_pairs: Annotated[int, Field(ge=0, le=_LIMITS.max_metadata_pairs)] = (
        _LIMITS.max_metadata_pairs
    )
    max_request_tokens: AtLeastOne = _LIMITS.max_request_tokens
    allow_request_chat_template: bool = _LIMITS.is_template_allowed
    header_wait_s: Seconds = 15.0
    keepalive_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    shutdown_grace_s: Seconds = 30.0
    prompt_log_folder: str = ""
    prompt_log_max_bytes: AtLeastOne = 64 << 20
    prompt_log_num_kept: AtLeastZero = 4
    api_keys_file: str = ""
    cors_origins: tuple[str, ...] = ()
    admin_key: SecretStr = SecretStr("")

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split_origins(cls, value: Any) -> Any:
        """Read the one string of a command line."""
        if isinstance(value, str):
            return tuple(origin.strip() for origin in value.split(",") if origin.strip())
        return value

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError("an origin is 'https://host', 'http://host:port' or '*'")
        return value

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        flat = self.model_fields_set & set(ModelEntry.model_fields)
        if self.models and flat:
            raise ValueError(
                f"{', '.join(sorted(flat))}: with models, give this in each of its entries"
            )
        return self

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        """The served models."""
        return self.models or (self,)

    @property
    def model_ids(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(entry.model_id for entry in self.entries)

    @property
    def request_limits(self) -> RequestLimits:
        """What one request may ask for."""
        return RequestLimits(
            is_template_allowed=self.allow_request_chat_template,
            **{
                field.name: getattr(self, field.name)
                for field in dataclasses.fields(RequestLimits)
                if field.name.startswith("max_")
            },
        )

    def check(self) -> None:
        """Check what goes across fields, without touching files.

        Raises:
            ConfigError: ``field`` names what cannot be served.
        """
        for entry in self.entries:
            entry.to_engine_config()
        if not _KEY.fullmatch(self.admin_key.get_secret_value()):
            raise ConfigError("admin_key", "must be of printable ASCII characters without spaces")
        model_ids = self.model_ids
        for model_id in model_ids:
            if model_ids.count(model_id) > 1:
                raise ConfigError("model_id", f"'{model_id}' names two models")
