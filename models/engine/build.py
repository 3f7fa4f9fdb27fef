"""Wires an engine from its configuration: the only place where its parts meet."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from models.adapters.trained_tokens import MAX_NUM_ADDED_TOKENS
from models.attention.backend import AttentionBackend
from models.attention.choice import choose_attention
from models.config import EngineConfig, ModelConfig
from models.engine.adapter_build import AdapterParts, build_adapter_desk, build_adapter_parts
from models.engine.adapter_uses import AdapterUses
from models.engine.async_engine import AsyncEngine
from models.engine.attention_build import build_attention
from models.engine.engine import Engine
from models.engine.intake import EngineLimits
from models.errors import ConfigError
from models.kv_cache.ledger import BlockManager
from models.kv_cache.store import KVCachePlan, KVCachePool, plan_kv_cache
from models.loading.arithmetic import matrix_unit, product_dtype
from models.loading.bundled import convert_gguf, ensure_bundled_model
from models.loading.loader import DTYPES, LoadedModel, load_model, resolve_device
from models.loading.preflight import (
    available_host_memory_bytes,
    check_model_files,
    locate_model,
)
from models.runner.model_runner import ModelRunner
from models.runner.output_head import make_logits_float32
from models.runner.packed_forward import PackedForward
from models.runner.row_stability import RowPolicy, make_row_independent
from models.scheduling.scheduler import Scheduler
from models.text.adapter_text import AdapterTexts
from models.text.tokenizer import Text
from models.text_front import TextFront
from sampling.errors import InvalidSamplingParamsError
from sampling.processors import LogitsProcessor, load_processor
from sampling.sampler import Sampler

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine and what it is made of.

    Attributes:
        engine: the synchronous core.
        runner: executes its plans.
        blocks: its ledger.
        kv_plan: size of the KV pool.
        row_policy: how products are kept row-independent.
        attention_backend: what attends, one of ATTENTION_BACKENDS.
        self_check_error: relative error of logits that the self-check found.
        adapters: what serves adapters, None if the configuration has none.
    """

    engine: Engine
    runner: ModelRunner
    blocks: BlockManager
    kv_plan: KVCachePlan
    row_policy: RowPolicy
    attention_backend: str
    self_check_error: float
    adapters: AdapterParts | None


def build_engine(config: EngineConfig, *, cache_folder: Path, progress: Progress) -> AsyncEngine:
    """Load a model and wire an engine around it; its step thread is not started.

    Takes seconds to minutes. Sets the number of compute threads of this process.

    Args:
        config: all of the engine.
        cache_folder: where converted models are kept.
        progress: told what goes on, one line each.

    Raises:
        ConfigError: the model cannot be served as configured, with the reason.
    """
    processors = load_processors(config.logits_processors)
    torch.set_num_threads(plan_num_threads(config.model))
    path = resolve_model_path(config.model, cache_folder, progress)
    if Path(path).exists():
        held = product_dtype(DTYPES[config.model.dtype], resolve_device(config.model.device))
        check_model_files(
            Path(path),
            dtype=str(held).removeprefix("torch."),
            device=config.model.device,
            kv_budget_bytes=config.kv_cache.budget_bytes,
            available_memory_bytes=available_memory_bytes(config.model.device),
        )
    loaded = load_model(config.model, path, progress)
    text = Text.load(
        path,
        chat_template=config.model.chat_template,
        vocabulary_size=loaded.vocabulary_size,
    )
    progress("measuring matrix products and running the first steps, against the model's own")
    parts = assemble(loaded, text, config, processors=processors)
    progress(
        f"KV cache: {parts.kv_plan.num_blocks} blocks of {parts.kv_plan.block_size_tokens} tokens, "
        f"{parts.kv_plan.num_tokens} tokens in all, {parts.kv_plan.total_bytes / 2**20:.0f} MiB; "
        f"attention by {parts.attention_backend}"
    )
    modules = parts.adapters.modules if parts.adapters is not None else ()
    desk = build_adapter_desk(
        loaded, modules, config.adapters, config.model, cache_folder, texts=AdapterTexts(text)
    )
    return AsyncEngine(parts.engine, text, adapters=desk)


def assemble(
    loaded: LoadedModel,
    text: TextFront,
    config: EngineConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    processors: Sequence[LogitsProcessor] = (),
) -> EngineParts:
    """Plug an engine into a loaded model.

    Args:
        loaded: the model.
        text: its tokenizer.
        config: all of the engine.
        clock: seconds; also the step loop's.
        processors: run after the sampler's own.

    Raises:
        ConfigError: the KV budget is too small, or the self-check fails.
    """
    max_rows = config.scheduler.max_num_batched_tokens
    policy = make_row_independent(
        loaded.model,
        dtype=loaded.dtype,
        max_rows=max_rows,
        is_batch_invariant=config.model.is_batch_invariant,
    )
    head_rows = policy.multiple if policy.is_fixed else max_rows
    make_logits_float32(loaded.model, dtype=loaded.dtype, max_rows=head_rows)
    choice = choose_attention(
        config.model.attention_backend, loaded.model, loaded.layers, loaded.dtype
    )
    block_size = choice.block_size_tokens(config.kv_cache.block_size_tokens)
    kv_config = dataclasses.replace(config.kv_cache, block_size_tokens=block_size)
    plan = plan_kv_cache(kv_config, loaded.layers, loaded.dtype)
    pool = _allocate(plan, loaded)
    adapters = build_adapter_parts(loaded, config.adapters)
    layers = adapters.layers if adapters is not None else None
    virtual_rows = adapters.virtual_rows if adapters is not None else None

    def make_forward(backend: AttentionBackend) -> PackedForward:
        return PackedForward(loaded.model, pool, backend, policy, layers, virtual_rows)

    attention = build_attention(
        loaded,
        pool,
        choice,
        make_forward,
        is_fixed=policy.is_fixed,
        model_id=config.model.model_id,
    )
    sampler = Sampler(
        # Requests are checked against their adapter's vocabulary before.
        loaded.vocabulary_size + MAX_NUM_ADDED_TOKENS,
        frozenset(each for each in text.eos_token_ids if each < loaded.vocabulary_size),
        processors,
    )
    runner = ModelRunner(
        attention.forward, sampler, adapters.store if adapters is not None else None
    )
    seats, uses = None, None
    if adapters is not None:
        seats = adapters.seats
        uses = AdapterUses(runner, seats, config.adapters.device_budget_bytes)
    blocks = BlockManager(
        plan.num_blocks,
        plan.block_size_tokens,
        is_prefix_caching_enabled=config.kv_cache.is_prefix_caching_enabled,
    )
    engine = Engine(
        Scheduler(
            config.scheduler,
            blocks,
            plan_num_scored_positions(config.prompt_logprobs_budget_bytes, loaded.vocabulary_size),
            seats,
        ),
        blocks,
        runner,
        text,
        EngineLimits(
            model_id=config.model.model_id,
            numerics=describe_numerics(loaded, policy, attention.name),
            vocabulary_size=loaded.vocabulary_size,
            max_model_len_tokens=loaded.max_model_len_tokens,
            default_max_tokens=config.default_max_tokens,
            max_num_choices=config.scheduler.max_num_choices,
            max_slot_wait_s=config.adapters.max_slot_wait_s,
        ),
        clock,
        uses,
    )
    return EngineParts(
        engine,
        runner,
        blocks,
        plan,
        policy,
        attention.name,
        attention.self_check_error,
        adapters,
    )


def available_memory_bytes(device: str) -> int:
    """Return the bytes that a model on ``device`` can still take.

    Raises:
        ConfigError: there is no such device here.
    """
    resolved = resolve_device(device)
    if resolved.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(resolved)
        return free_bytes
    return available_host_memory_bytes()


def _allocate(plan: KVCachePlan, loaded: LoadedModel) -> KVCachePool:
    try:
        return KVCachePool(plan, loaded.layers, loaded.dtype, loaded.model.device)
    except RuntimeError as error:  # what torch raises on any device
        raise ConfigError(
            "kv_budget_bytes",
            f"the device has no room for a KV cache of {plan.total_bytes / 2**30:.1f} GiB",
        ) from error


def resolve_model_path(config: ModelConfig, cache_folder: Path, progress: Progress) -> str:
    """Return a folder or hub id that transformers reads, converting first where needed.

    Raises:
        ConfigError: there is no such model, the bundled one's package is missing, or a GGUF file
            cannot be read.
    """
    if not config.path:
        return str(ensure_bundled_model(cache_folder, progress))
    path = locate_model(config.path)
    if path is None:
        return config.path
    if path.suffix == ".gguf":
        return str(convert_gguf(path, cache_folder, progress, dtype=DTYPES[config.dtype]))
    return str(path)


def load_processors(paths: Sequence[str]) -> tuple[LogitsProcessor, ...]:
    """Make the processors that the configuration names.

    Raises:
        ConfigError: one cannot be made, whatever its module does wrong, with the reason.
    """
    processors = []
    for path in paths:
        try:
            processors.append(load_processor(path))
        except InvalidSamplingParamsError as error:
            raise ConfigError(error.param, error.reason) from error
        except Exception as error:  # it is the code of others
            raise ConfigError("logits_processors", f"'{path}' failed: {error!r}") from error
    return tuple(processors)


def plan_num_threads(config: ModelConfig) -> int:
    """Return the number of compute threads: the configured one, or the cores we may use."""
    return config.num_threads or len(os.sched_getaffinity(0))


def plan_num_scored_positions(budget_bytes: int, vocabulary_size: int) -> int:
    """Return how many positions of a step may have logits for the prompt, in float32."""
    return max(budget_bytes // (4 * vocabulary_size), 1)


def describe_numerics(loaded: LoadedModel, policy: RowPolicy, attention_backend: str) -> str:
    """Name the arithmetic: replicas with equal names give equal results bit for bit."""
    device = loaded.model.device
    if device.type == "cpu":
        hardware = (
            f"cpu-{torch.backends.cpu.get_cpu_capability()}-{matrix_unit()}"
            f"-tile{policy.smallest_tile_rows}-threads{torch.get_num_threads()}"
        )
    else:
        hardware = torch.cuda.get_device_name(device).replace(" ", "-")
        if policy.is_fixed:
            hardware += f"-rows{policy.multiple}"
    dtype = str(loaded.dtype).removeprefix("torch.")
    return f"torch-{torch.__version__.split('+')[0]}/{hardware}/{attention_backend}/{dtype}"
