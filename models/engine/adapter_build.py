"""Wires what serves adapters: store and hooks on the model, ledger, source and catalogue."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from models.adapters.catalogue import AdapterCatalogue, CatalogueConfig
from models.adapters.folder_source import FolderSource
from models.adapters.ledger import AdapterLedger, plan_bucket_ranks
from models.adapters.reading import read_adapter
from models.adapters.source import AdapterFiles
from models.adapters.store import AdapterStore
from models.adapters.weights import AdapterWeights, ModelFacts, ModuleShape
from models.config import AdapterConfig, ModelConfig
from models.engine.adapter_desk import AdapterDesk
from models.errors import ConfigError
from models.loading.arithmetic import product_dtype
from models.loading.loader import LoadedModel
from models.runner.adapter_layers import AdapterLayers, discover_modules
from models.scheduling.adapter_seats import AdapterSeats

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterParts:
    """What of an engine deals with adapters.

    Attributes:
        store: tensors in slots.
        layers: hooks on the model.
        seats: the scheduler's view of the slots.
        modules: what adapters may change.
    """

    store: AdapterStore
    layers: AdapterLayers
    seats: AdapterSeats
    modules: tuple[ModuleShape, ...]


def build_adapter_parts(loaded: LoadedModel, config: AdapterConfig) -> AdapterParts | None:
    """Make a loaded model ready for adapters; None if the configuration has none.

    Args:
        loaded: its products have been made row-independent.
        config: slots and budgets.
    """
    if not config.path:
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
    return AdapterParts(store, AdapterLayers(loaded.model, store), AdapterSeats(ledger), modules)


def build_adapter_desk(
    loaded: LoadedModel,
    modules: tuple[ModuleShape, ...],
    config: AdapterConfig,
    model_config: ModelConfig,
    clock: Callable[[], float] = time.monotonic,
) -> AdapterDesk:
    """Open the folder of a model's adapters.

    Args:
        loaded: the base model.
        modules: what adapters may change.
        config: folder and budgets.
        model_config: names of the base model.
        clock: seconds.

    Raises:
        ConfigError: there is no such folder.
    """
    if not config.path:
        return AdapterDesk(None, None, clock)
    root = Path(config.path).expanduser()
    if not root.is_dir():
        raise ConfigError("adapters", f"there is no folder '{root}'")
    facts = _facts_of(loaded.model, modules, config, model_config)

    def load(files: AdapterFiles) -> AdapterWeights:
        weights = read_adapter(files, facts)
        for warning in weights.warnings:
            _logger.warning("adapter %s: %s", files.adapter_id, warning)
        return weights

    source = FolderSource(root, clock)
    catalogue = AdapterCatalogue(
        source,
        load,
        CatalogueConfig(budget_bytes=config.host_budget_bytes, max_wait_s=config.max_slot_wait_s),
        clock,
    )
    return AdapterDesk(source, catalogue, clock)


def _facts_of(
    model: PreTrainedModel,
    modules: tuple[ModuleShape, ...],
    config: AdapterConfig,
    model_config: ModelConfig,
) -> ModelFacts:
    head = model.get_output_embeddings()
    names = (model_config.model_id, model_config.path, str(model.config._name_or_path))

    def weight(name: str) -> Tensor:
        module = model.get_submodule(name)
        stored = _parameter(module, "weight")
        return stored.t() if isinstance(module, Conv1D) else stored

    return ModelFacts(
        base_names=tuple(name for name in names if name),
        modules={shape.name: shape for shape in modules},
        output_head=next((name for name, module in model.named_modules() if module is head), None),
        max_rank=config.max_rank,
        weight=weight,
        bias=lambda name: _parameter(model.get_submodule(name), "bias"),
    )


def _parameter(module: nn.Module, name: str) -> Tensor:
    parameter = getattr(module, name)
    assert isinstance(parameter, Tensor)
    return parameter.detach().to(device="cpu", dtype=torch.float32)
