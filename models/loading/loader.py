"""From a model's files to a transformers model in memory, with what the engine must know of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from models.attention.backend import attention_of, check_keywords, layer_index
from models.attention.layout import StepLayout
from models.config import ModelConfig
from models.errors import ConfigError
from models.kv_cache.store import LayerShape
from models.loading.compatibility import check_class, check_config, fix_longrope

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to be plugged into.

    Attributes:
        model: in evaluation mode, on its device.
        layers: shapes of keys and values, by ``layer_idx``.
        vocabulary_size: rows of the output head: ids below are valid.
        max_model_len_tokens: the window: the model's own, or less if the configuration says so.
        dtype: of weights and KV.
    """

    model: PreTrainedModel
    layers: tuple[LayerShape, ...]
    vocabulary_size: int
    max_model_len_tokens: int
    dtype: torch.dtype


def load_model(config: ModelConfig, path: str, progress: Callable[[str], None]) -> LoadedModel:
    """Load weights and check that the engine can serve them.

    Args:
        config: device, dtype and window.
        path: folder or hub id (``config.path`` once the bundled model or a GGUF file is resolved).
        progress: told what goes on, one line each.

    Raises:
        ConfigError: not found, not a causal language model, or not servable, with the reason.
    """
    hf_config = _read_config(path)
    check_config(hf_config)
    device = resolve_device(config.device)
    dtype = DTYPES[config.dtype]
    progress(f"loading weights of {path or config.model_id} as {config.dtype} on {config.device}")
    model = _read_weights(path, dtype, device)
    check_class(type(model))
    window = plan_max_model_len(hf_config, config.max_model_len_tokens)
    fix_longrope(model, window)
    return LoadedModel(
        model=model,
        layers=tuple(discover_layers(model)),
        vocabulary_size=_vocabulary_size(model),
        max_model_len_tokens=window,
        dtype=dtype,
    )


def plan_max_model_len(hf_config: PreTrainedConfig, requested_tokens: int) -> int:
    """Return the window in tokens: the model's own, or a smaller requested one.

    Raises:
        ConfigError: the request exceeds the model's window, or the model names none.
    """
    own = getattr(hf_config, "max_position_embeddings", None)
    if own is None:
        if not requested_tokens:
            raise ConfigError(
                "max_model_len_tokens", "this model names no window of its own; set one"
            )
        return requested_tokens
    if requested_tokens > own:
        raise ConfigError(
            "max_model_len_tokens", f"{requested_tokens} is more than this model's window of {own}"
        )
    return requested_tokens or int(own)


def discover_layers(model: PreTrainedModel) -> list[LayerShape]:
    """Run one token through the model and note what each attention layer hands over.

    Raises:
        ConfigError: a layer does not call the attention interface, two layers share one index, a
            keyword is not understood, or the model does not run at all.
    """
    recorder = _Recorder()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode(), attention_of(model, recorder):
            model(input_ids=token, position_ids=token, use_cache=False)
    except ConfigError:
        raise
    except Exception as error:  # code of a hundred architectures
        raise ConfigError(
            "model", f"{type(model).__name__} cannot run packed tokens: {_first_line(error)}"
        ) from error
    indices = sorted(recorder.shapes)
    expected = model.config.num_hidden_layers
    if indices != list(range(expected)):
        raise ConfigError(
            "model",
            f"{type(model).__name__} has {expected} layers, but {len(indices)} use the attention "
            f"interface: {indices}",
        )
    return [recorder.shapes[index] for index in indices]


class _Recorder:
    """An attention backend that attends to nothing and notes shapes."""

    is_row_independent = True

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def begin_step(self, layout: StepLayout) -> None:
        """Nothing to prepare."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002 - part of the interface
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Note the shapes of one layer."""
        check_keywords(keywords)
        layer = layer_index(module)
        if layer in self.shapes:
            raise ConfigError("model", f"two attention layers have the index {layer}")
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        output = value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        return output, None


def _read_config(path: str) -> PreTrainedConfig:
    try:
        with _quiet():
            return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers and its libraries share no class
        raise ConfigError("model", f"'{path}' cannot be read: {_first_line(error)}") from error


def _read_weights(path: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    try:
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                # Reported below, by name.
                ignore_mismatched_sizes=True,
            )
        served: PreTrainedModel = model.to(device).eval()
    except Exception as error:  # transformers and its libraries share no class
        raise ConfigError(
            "model", f"'{path}' cannot be loaded as a causal language model: {_first_line(error)}"
        ) from error
    # transformers fills both kinds with random numbers, which no comparison of the model with
    # itself could notice.
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            "model", f"'{path}' lacks {len(missing)} of its weights, the first being {missing[0]}"
        )
    if mismatched := sorted(info["mismatched_keys"]):
        name, stored, configured = mismatched[0]
        raise ConfigError(
            "model",
            f"'{path}' has weights that its configuration contradicts: {name} is "
            f"{list(stored)}, not {list(configured)}",
        )
    return served


def _vocabulary_size(model: PreTrainedModel) -> int:
    """Return the rows of the output head.

    Raises:
        ConfigError: there is no head, or it can name tokens that cannot be read back.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError("model", f"{type(model).__name__} has no output head")
    num_rows = int(head.weight.shape[0])
    num_readable = model.get_input_embeddings().weight.shape[0]
    if num_rows > num_readable:
        raise ConfigError(
            "model",
            f"{type(model).__name__} can draw {num_rows} tokens, but reads {num_readable} only",
        )
    return num_rows


def resolve_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises:
        ConfigError: there is none, or not here.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", f"'{name}' is not a device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", f"'{name}': no GPU is available here")
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ConfigError("device", f"'{name}': the last GPU here is cuda:{num_gpus - 1}")
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError("device", f"'{name}' is neither cpu nor cuda")
    return device


def _first_line(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is not known"
    lines = str(error).strip().split("\n")
    # A heading says nothing without its next line.
    wanted = lines[: 2 if lines[0].endswith(":") else 1]
    return " ".join(line.strip() for line in wanted) or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bars and warnings off the terminal while loading."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
