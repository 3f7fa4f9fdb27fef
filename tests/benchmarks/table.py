"""The one table of a benchmark: rows of figures with units, as text that is also Markdown."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_PACKAGES = ("torch", "ray", "transformers")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure at each number of clients, or of whatever the table counts.

    Attributes:
        name: what was measured.
        unit: of the figures.
        values: by that number; a figure that has nothing to do with it is at 1.
        digits: behind the decimal point.
    """

    name: str
    unit: str
    values: Mapping[int, float]
    digits: int = 0


def format_table(rows: Sequence[Row], counts: Sequence[int], *, counted: str = "client") -> str:
    """Return the table, aligned.

    Args:
        rows: from top to bottom.
        counts: the columns.
        counted: the singular of what they count.
    """
    names = [f"{count} {counted if count == 1 else counted + 's'}" for count in counts]
    cells = [["figure", "unit", *names]]
    cells += [
        [
            row.name,
            row.unit,
            *(
                f"{row.values[count]:,.{row.digits}f}" if count in row.values else ""
                for count in counts
            ),
        ]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = [_join(line, widths) for line in cells]
    rule = ["-" * width for width in widths[:2]]
    rule += ["-" * (width - 1) + ":" for width in widths[2:]]
    return "\n".join([lines[0], _join(rule, widths), *lines[1:]])


def describe_machine() -> str:
    """Return date, CPU and versions, one line."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    num_cores = len(os.sched_getaffinity(0))
    return (
        f"{today}; {_cpu_name()}, {num_cores} cores; Python {platform.python_version()}, {versions}"
    )


def _join(cells: Sequence[str], widths: Sequence[int]) -> str:
    texts = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    texts += [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return f"| {' | '.join(texts)} |"


def _cpu_name() -> str:
    """Return the name, with the two features that decide the speed of bfloat16."""
    fields: dict[str, str] = {}
    for line in _CPU_INFO.read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    features = [name for name in ("avx512_bf16", "amx_bf16") if name in flags]
    return " ".join([fields.get("model name", platform.machine()), *features])
