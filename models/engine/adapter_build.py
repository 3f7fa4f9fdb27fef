"""Wires what serves adapters: store and hooks on the model, ledger, source and catalogue."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from models.adapters.catalogue import AdapterCatalogue, CatalogueConfig
from models.adapters.ledger import AdapterLedger, plan_bucket_ranks
from models.adapters.meter import AdapterMeter
from models.adapters.reading import max_adapter_bytes, parse_adapter, read_adapter_files
from models.adapters.source import AdapterFiles
from models.adapters.store import AdapterStore
from models.adapters.weights import AdapterWeights, ModelFacts, ModuleShape
from models.config import AdapterConfig, ModelConfig
from models.engine.adapter_desk import AdapterDesk
from models.engine.adapter_own_text import with_own_text
from models.engine.adapter_sources import is_fetching, open_source
from models.loading.arithmetic import product_dtype
from models.loading.loader import LoadedModel
from models.requests import AdapterRef
from models.runner.adapter_layers import AdapterLayers
from models.runner.module_discovery import discover_modules
from models.runner.virtual_rows import VirtualTokenRows, virtual_facts_of
from models.scheduling.adapter_seats import AdapterSeats
from models.text.adapter_text import AdapterTexts

_logger = logging.getLogger(__name__)

_NUM_THREADS_THAT_WAIT_FOR_NETWORK = 16


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterParts:
    """What of an engine deals with adapters.

    Attributes:
        store: tensors in slots.
        layers: hooks on the model.
        virtual_rows: the hook on its embedding module.
        seats: the scheduler's view of the slots.
        modules: what adapters may change.
    """

    store: AdapterStore
    layers: AdapterLayers
    virtual_rows: VirtualTokenRows
    seats: AdapterSeats
    modules: tuple[ModuleShape, ...]


def build_adapter_parts(loaded: LoadedModel, config: AdapterConfig) -> AdapterParts | None:
    """Make a loaded model ready for adapters; None if the configuration has none.

    Args:
        loaded: its products have been made row-independent.
        config: slots and budgets.
    """
    if not config.is_enabled:
        return None
    modules = discover_modules(loaded.model)
    device = loaded.model.device
    bucket_ranks = plan_bucket_ranks(config.max_rank)
    store = AdapterStore(
        modules, config.max_num_slots, bucket_ranks, product_dtype(loaded.dtype, device), device
    )
    ledger = AdapterLedger(
        budget_bytes=config.device_budget_bytes,
        max_num_slots=config.max_num_slots,
        bucket_ranks=bucket_ranks,
    )
    return AdapterParts(
        store=store,
        layers=AdapterLayers(loaded.model, store),
        # Its hook comes last: whatever an adapter adds to the rows of an embedding, virtual
        # tokens have no ids there.
        virtual_rows=VirtualTokenRows(loaded.model, store),
        seats=AdapterSeats(ledger),
        modules=modules,
    )


def build_adapter_desk(
    loaded: LoadedModel,
    modules: tuple[ModuleShape, ...],
    config: AdapterConfig,
    model_config: ModelConfig,
    cache_folder: Path,
    *,
    texts: AdapterTexts,
    clock: Callable[[], float] = time.monotonic,
) -> AdapterDesk:
    """Open the sources of a model's adapters.

    Args:
        loaded: the base model.
        modules: what adapters may change.
        config: sources and budgets.
        model_config: names of the base model.
        cache_folder: where downloaded adapters are kept.
        texts: reads their own tokenizer files; the desk closes it.
        clock: seconds.

    Raises:
        ConfigError: there is no such folder, or no library for the URL.
    """
    if not config.is_enabled:
        return AdapterDesk(None, None, clock, on_close=texts.close)
    facts = _facts_of(loaded, modules, config, model_config)

    def load(files: AdapterFiles) -> AdapterWeights:
        contents = read_adapter_files(files, facts)
        weights = parse_adapter(AdapterRef(files.adapter_id, files.version), contents, facts)
        weights = with_own_text(weights, contents, texts)
        for warning in weights.warnings:
            _logger.warning("adapter %s: %s", files.adapter_id, warning)
        return weights

    source = open_source(
        config, cache_folder=cache_folder, max_num_bytes=max_adapter_bytes(facts), clock=clock
    )
    limits = CatalogueConfig(
        budget_bytes=config.host_budget_bytes, max_wait_s=config.max_slot_wait_s
    )
    if is_fetching(config):
        limits = dataclasses.replace(limits, num_find_threads=_NUM_THREADS_THAT_WAIT_FOR_NETWORK)
    meter = AdapterMeter(config.max_num_metered)
    catalogue = AdapterCatalogue(source, load, limits, clock, meter)
    return AdapterDesk(source, catalogue, clock, meter, on_close=texts.close)


def _facts_of(
    loaded: LoadedModel,
    modules: tuple[ModuleShape, ...],
    config: AdapterConfig,
    model_config: ModelConfig,
) -> ModelFacts:
    model = loaded.model
    embedding = _find_name(model, model.get_input_embeddings())
    by_name = {shape.name: shape for shape in modules}
    names = (model_config.model_id, model_config.path, str(model.config._name_or_path))

    def weight(name: str) -> Tensor:
        module = model.get_submodule(name)
        stored = _parameter(module, "weight")
        return stored.t() if isinstance(module, Conv1D | nn.Embedding) else stored

    return ModelFacts(
        base_names=tuple(name for name in names if name),
        modules=by_name,
        output_head=_find_name(model, model.get_output_embeddings()),
        max_rank=config.max_rank,
        virtual_tokens=virtual_facts_of(
            loaded.model,
            loaded.layers,
            # One token of text and one new one must find room behind them.
            max_num_tokens=min(config.max_virtual_tokens, loaded.max_model_len_tokens - 2),
        ),
        weight=weight,
        bias=lambda name: _parameter(model.get_submodule(name), "bias"),
        input_embedding=embedding if embedding in by_name else None,
        is_head_tied=bool(model.config.get_text_config().tie_word_embeddings),
    )


def _find_name(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_modules() if module is wanted), None)


def _parameter(module: nn.Module, name: str) -> Tensor:
    parameter = getattr(module, name)
    assert isinstance(parameter, Tensor)
    return parameter.detach().to(device="cpu", dtype=torch.float32)
