"""Checks a model's files before anything heavy starts. Reads headers, loads no weights, no torch.

What is wrong with a path is said in one sentence, in milliseconds, instead of in a traceback
minutes later.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from models.errors import ConfigError

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Bytes per element of stored types; floating-point ones are converted to the served type.
_STORED_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_STORED_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_HUB_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_MAX_HUB_ID_CHARACTERS = 96
_GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the files of a model say.

    Attributes:
        model_type: of the configuration; "" if it names none.
        architectures: classes that the configuration names; may be empty.
        num_parameters: elements of all stored tensors.
        weights_bytes: memory of the weights in the served dtype.
    """

    model_type: str
    architectures: tuple[str, ...]
    num_parameters: int
    weights_bytes: int


def locate_model(model: str) -> Path | None:
    """Return where a model lies, or None if the text is the id of one on a model hub.

    What exists is local. Of the rest, only "name" and "org/name" can be hub ids; a text that
    looks like a path never is.

    Args:
        model: path of a folder or of a ``.gguf`` file, or a hub id.

    Raises:
        ConfigError: it is neither.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    parts = model.split("/")
    is_path_like = model.startswith(("/", ".", "~")) or "\\" in model or model.endswith(".gguf")
    is_plausible = len(parts) <= 2 and len(model) <= _MAX_HUB_ID_CHARACTERS
    if is_path_like or not is_plausible or not all(_HUB_PART.fullmatch(part) for part in parts):
        raise ConfigError(
            "model",
            f"there is no such folder or file, and this is no id of a model hub: '{model}'",
        )
    return None


def check_model_files(
    path: Path,
    *,
    dtype: str,
    device: str,
    kv_budget_bytes: int,
    available_memory_bytes: int,
) -> ModelFacts:
    """Check that a folder holds a causal language model that fits in memory.

    Args:
        path: the folder.
        dtype: in which the weights will be held.
        device: named in messages.
        kv_budget_bytes: memory for keys and values, taken besides the weights.
        available_memory_bytes: what the device has to give.

    Raises:
        ConfigError: it does not, in one sentence.
    """
    if not path.exists():
        raise ConfigError("model", f"there is no folder '{path}'")
    if not path.is_dir():
        raise ConfigError("model", f"'{path}' is a file, not the folder of a model")
    config = _read_config(path)
    architectures = _check_architectures(path, config)
    headers = [_read_header(file) for file in _weight_files(path)]
    num_parameters, weights_bytes = _measure(headers, _DTYPE_BYTES[dtype])
    needed_bytes = weights_bytes + kv_budget_bytes
    if needed_bytes > available_memory_bytes:
        raise ConfigError(
            "model",
            f"'{path}' needs {needed_bytes / _GIB:.2f} GiB on {device} "
            f"({weights_bytes / _GIB:.2f} GiB of weights as {dtype} and "
            f"{kv_budget_bytes / _GIB:.2f} GiB of kv_budget_bytes), but only "
            f"{available_memory_bytes / _GIB:.2f} GiB are available",
        )
    model_type = str(config.get("model_type") or "")
    return ModelFacts(model_type, architectures, num_parameters, weights_bytes)


def available_host_memory_bytes(cgroup_folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that this process may still take: the machine's, or its container's.

    Args:
        cgroup_folder: where the control group's limits lie, if there are any.
    """
    available: int = psutil.virtual_memory().available
    try:
        limit = (cgroup_folder / "memory.max").read_text().strip()
        used = int((cgroup_folder / "memory.current").read_text())
        statistics = (cgroup_folder / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return available
    if not limit.isdigit():
        return available
    # Cached files count as used, but make room when memory is asked for.
    reclaimable = int(statistics[statistics.index("inactive_file") + 1])
    return max(0, min(available, int(limit) - used + reclaimable))


def _read_config(path: Path) -> Mapping[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        if (path / "adapter_config.json").is_file():
            raise ConfigError("model", f"'{path}' is a PEFT adapter, not a model")
        raise ConfigError("model", f"'{path}' is not a model: it has no config.json")
    config = _read_json(file)
    if not isinstance(config, dict):
        raise ConfigError("model", f"'{file}' is not a model's configuration")
    return config


def _check_architectures(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the architectures.

    Raises:
        ConfigError: none of them is a causal language model.
    """
    architectures = tuple(str(name) for name in config.get("architectures") or ())
    if not architectures and not config.get("model_type"):
        raise ConfigError(
            "model", f"'{path}/config.json' names neither architectures nor a model_type"
        )
    if config.get("is_encoder_decoder"):
        kind = ", ".join(architectures) or config.get("model_type")
        raise ConfigError("model", f"'{path}' is an encoder-decoder model ({kind})")
    if architectures and not any(name.endswith(_CAUSAL_SUFFIXES) for name in architectures):
        raise ConfigError(
            "model", f"'{path}' is not a causal language model but {', '.join(architectures)}"
        )
    return architectures


def _weight_files(path: Path) -> list[Path]:
    """Return the files that hold the weights.

    Raises:
        ConfigError: there are none, or some are missing.
    """
    if (path / _WEIGHTS).is_file():
        return [path / _WEIGHTS]
    index_file = path / _WEIGHTS_INDEX
    if not index_file.is_file():
        raise ConfigError("model", _explain_missing_weights(path))
    index = _read_json(index_file)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError("model", f"'{index_file}' lists no weights")
    files = [path / name for name in sorted(set(weight_map.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(
            "model",
            f"'{path}' lacks {len(missing)} of its {len(files)} weight files "
            f"({missing[0]}{' and more' if len(missing) > 1 else ''})",
        )
    return files


def _explain_missing_weights(path: Path) -> str:
    """Say what lies there instead of safetensors."""
    names = sorted(file.name for file in path.iterdir())
    if pickled := [name for name in names if name.endswith((".bin", ".pt", ".pth"))]:
        return (
            f"'{path}' has its weights only as {pickled[0]}, a pickle that can run code when it is "
            "loaded; convert it to safetensors"
        )
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return f"'{path}' has no safetensors; to serve a GGUF file name it: '{path / ggufs[0]}'"
    return f"'{path}' has no weights: neither {_WEIGHTS} nor {_WEIGHTS_INDEX}"


def _read_header(file: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return what a safetensors file says of its tensors, by name.

    Raises:
        ConfigError: it is no such file, or it is cut short.
    """
    num_file_bytes = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        (num_header_bytes,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (0,)
        if not 0 < num_header_bytes <= min(_MAX_HEADER_BYTES, num_file_bytes):
            raise ConfigError(
                "model", f"'{file}' is not a safetensors file (perhaps an unfetched Git LFS link)"
            )
        encoded = stream.read(num_header_bytes)
    try:
        tensors: dict[str, Mapping[str, Any]] = json.loads(encoded)
        tensors.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        num_expected_bytes = 8 + num_header_bytes + int(end)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError("model", f"'{file}' has a damaged header") from error
    if num_file_bytes < num_expected_bytes:
        raise ConfigError(
            "model", f"'{file}' is incomplete: {num_file_bytes} of {num_expected_bytes} bytes"
        )
    return tensors


def _measure(
    headers: Iterable[Mapping[str, Mapping[str, Any]]], float_bytes: int
) -> tuple[int, int]:
    """Return the number of parameters and their bytes in memory."""
    num_parameters = 0
    num_bytes = 0
    for tensor in (tensor for header in headers for tensor in header.values()):
        kind = tensor["dtype"]
        count = math.prod(tensor["shape"])
        num_parameters += count
        num_bytes += count * (float_bytes if kind in _STORED_FLOATS else _STORED_BYTES.get(kind, 1))
    return num_parameters, num_bytes


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("model", f"'{file}' cannot be read: {error}") from error
