"""Turns the files of a PEFT adapter into tensors that a base model can serve, or says why not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from models.adapters.adapter_plan import AdapterPlan, AdapterSpec
from models.adapters.faults import AdapterFaultError, shown
from models.adapters.method import AdapterChanges
from models.adapters.patterns import PatternMatcher
from models.adapters.peft_config import MAX_CONFIG_BYTES, read_peft_config
from models.adapters.source import (
    MAX_TEXT_FILE_BYTES,
    TEXT_NAMES,
    AdapterContents,
    AdapterFiles,
    read_contents,
)
from models.adapters.targets import describe_unmatched
from models.adapters.tensor_file import MAX_HEADER_BYTES, TensorFile
from models.adapters.tensor_plan import PlannedTensor, match_tensors
from models.adapters.weights import AdapterWeights, ModelFacts, is_finite
from models.errors import AdapterIncompatibleError
from models.requests import AdapterRef

# Two roundings of the same number to bfloat16, one at training and one here, differ by less.
_SAME_WEIGHT_TOLERANCE = 2.0**-7


def read_adapter(files: AdapterFiles, model: ModelFacts) -> AdapterWeights:
    """Read exactly one version of an adapter and check every part of it.

    Blocks on the disk and computes; may run in any thread. Owner of the result: the caller.

    Raises:
        AdapterIncompatibleError: it cannot be served on this model; the reason is one sentence.
        FilesChangedError: the files are not of this version any more.
        OSError: they cannot be read.
    """
    contents = read_adapter_files(files, model)
    return parse_adapter(AdapterRef(files.adapter_id, files.version), contents, model)


def read_adapter_files(files: AdapterFiles, model: ModelFacts) -> AdapterContents:
    """Read exactly one version of an adapter into memory, unless it is too large.

    Raises:
        AdapterIncompatibleError: it is.
        FilesChangedError: the files are not of this version any more.
        OSError: they cannot be read.
    """
    limit = max_adapter_bytes(model) + len(TEXT_NAMES) * MAX_TEXT_FILE_BYTES
    if files.num_bytes > limit:
        raise AdapterIncompatibleError(
            files.adapter_id, f"its files have {files.num_bytes} bytes; the limit here is {limit}"
        )
    contents = read_contents(files)
    for name, content in contents.texts.items():
        if len(content) > MAX_TEXT_FILE_BYTES:
            raise AdapterIncompatibleError(
                files.adapter_id,
                f"its {name} has {len(content)} bytes; the limit is {MAX_TEXT_FILE_BYTES}",
            )
    return contents


def max_adapter_bytes(model: ModelFacts) -> int:
    """Return the most bytes that the config and the weights of a served adapter can have."""
    return MAX_CONFIG_BYTES + _max_num_bytes(model)


def parse_adapter(ref: AdapterRef, contents: AdapterContents, model: ModelFacts) -> AdapterWeights:
    """Check and convert what was read.

    Raises:
        AdapterIncompatibleError: it cannot be served on this model; the reason is one sentence.
    """
    try:
        changes, warnings = _parse(contents, model)
    except AdapterFaultError as fault:
        raise AdapterIncompatibleError(ref.id, str(fault)) from fault
    return AdapterWeights(
        ref=ref,
        modules=changes.modules,
        rank=max((delta.rank for delta in changes.modules.values()), default=0),
        num_bytes=changes.num_bytes,
        virtual_tokens=changes.virtual_tokens,
        num_added_tokens=changes.num_added_tokens,
        warnings=warnings,
    )


def _max_num_bytes(model: ModelFacts) -> int:
    """Return the largest size of an adapter's weights in float32, header and all."""
    num_elements = model.virtual_tokens.max_num_elements
    for shape in model.modules.values():
        num_elements += (model.max_rank + 3) * (shape.num_inputs + shape.num_outputs)
        num_elements += math.prod(shape.table_shape)
    return 4 * num_elements + MAX_HEADER_BYTES


def _parse(contents: AdapterContents, model: ModelFacts) -> tuple[AdapterChanges, tuple[str, ...]]:
    spec = read_peft_config(contents.config)
    plan = AdapterPlan(spec, model, PatternMatcher())
    own = {tensor.key for tensor in plan.tensors}
    base_tables = [
        table for table in _plan_base_tables(model, plan.num_added_tokens) if table.key not in own
    ]
    file = TensorFile(contents.weights)
    names = match_tensors([*plan.tensors, *base_tables], file.tensors, model)
    # Nothing is allocated for tensors before all names and shapes are known to fit.
    stored = file.load()
    tensors = {key: stored[name] for key, name in names.items()}
    _check_finite(tensors)
    _check_base_tables(base_tables, tensors, model)
    with torch.no_grad():
        changes = plan.build(tensors)
    for name, delta in changes.modules.items():
        if not delta.is_finite:
            raise AdapterFaultError(f"what it does to module '{name}' is not finite")
    return changes, tuple(_warn(spec, changes, model))


def _plan_base_tables(model: ModelFacts, num_added_tokens: int) -> Iterator[PlannedTensor]:
    """Plan for copies of the base's own tables, which PEFT saves when it is in doubt.

    Tokens that were added stand behind the base's.
    """
    for shape in model.modules.values():
        if shape.is_embedding or shape.name == model.output_head:
            num_rows, width = shape.table_shape
            if shape.name in (model.input_embedding, model.output_head):
                num_rows += num_added_tokens
            yield PlannedTensor(shape.name, "weight", (num_rows, width), is_optional=True)


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        if not is_finite(tensor):
            raise AdapterFaultError(f"the tensor '{shown(key)}' holds NaN or infinity")


def _check_base_tables(
    planned: list[PlannedTensor], tensors: Mapping[str, Tensor], model: ModelFacts
) -> None:
    """Check that saved copies of the base's tables are what the base has.

    Raises:
        AdapterFaultError: one was trained besides, or is another model's.
    """
    for tensor in planned:
        if tensor.key not in tensors:
            continue
        shape = model.modules[tensor.module]
        weight = model.weight(shape.name)
        table = weight.t() if shape.is_transposed or shape.is_embedding else weight
        if not _is_same(tensors[tensor.key][: len(table)].float(), table):
            raise AdapterFaultError(
                f"it brings a changed weight for '{tensor.module}', which its configuration does "
                "not account for (modules_to_save)"
            )


def _is_same(saved: Tensor, base: Tensor) -> bool:
    return torch.allclose(saved, base, rtol=_SAME_WEIGHT_TOLERANCE, atol=1e-30)


def _warn(spec: AdapterSpec, changes: AdapterChanges, model: ModelFacts) -> Iterator[str]:
    method = spec.method
    if method.base_name and not _is_same_base(method.base_name, model.base_names):
        yield (
            f"it was trained on '{shown(method.base_name)}', not on "
            f"'{' or '.join(model.base_names)}'; all shapes fit, so it is served"
        )
    if unmatched := method.unmatched(model):
        yield describe_unmatched(unmatched, option="target_modules")
    if unmatched := spec.saved.unmatched(model):
        yield describe_unmatched(unmatched, option="modules_to_save")
    head = changes.modules.get(model.output_head or "")
    if changes.num_added_tokens and (head is None or head.token_rows is None):
        yield "its file has no rows of the output head for its added tokens: they are never drawn"
    if changes.changes_nothing:
        yield "it changes nothing: the base model answers the same"


def _is_same_base(name: str, base_names: tuple[str, ...]) -> bool:
    """Compare the last parts: one model has many owners and folders."""
    return _last_part(name) in {_last_part(base_name) for base_name in base_names}


def _last_part(name: str) -> str:
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1].lower()
