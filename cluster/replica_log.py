"""Follows what the replicas write to Serve's log files, for the person who started them.

Ray could forward all output of all workers instead, which drowns the few lines that matter.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

# Level, date, time, component, replica, at times a request id, two hyphens, the message.
_RECORD = re.compile(
    r"^(?P<level>[A-Z]+) \S+ \S+ (?P<component>\S+) (?P<replica>\S+) (?:\S+ )?-- (?P<text>.*)$"
)
_SHOWN_LEVELS = ("WARNING", "ERROR", "CRITICAL")


@dataclasses.dataclass(slots=True)
class _Position:
    offset_bytes: int = 0
    is_shown: bool = False


class ReplicaLog:
    """New lines of the replicas' logs that a person should see.

    Shown are warnings, errors with the lines that follow them, and progress: the records that
    start with the progress mark.

    Attributes:
        folder: where the files are.

    Owner: one thread.
    """

    def __init__(self, session_folder: Path, application: str, progress_mark: str) -> None:
        """Follow from the start of every file, also of those that appear later.

        Args:
            session_folder: Ray's folder of this session.
            application: name of the Serve application.
            progress_mark: how a record starts that tells of progress; the mark is cut off.
        """
        self.folder = session_folder / "logs" / "serve"
        self._pattern = f"replica_{application}_*.log"
        self._progress_mark = progress_mark
        self._positions: dict[Path, _Position] = {}

    def read_new(self) -> list[str]:
        """Return the lines to show since the last call."""
        return [
            line
            for path in sorted(self.folder.glob(self._pattern))
            for line in self._read_file(path)
        ]

    def _read_file(self, path: Path) -> list[str]:
        position = self._positions.setdefault(path, _Position())
        with path.open("rb") as file:
            file.seek(position.offset_bytes)
            new = file.read()
        # A line that is still being written is left for the next call.
        whole = new[: new.rfind(b"\n") + 1]
        position.offset_bytes += len(whole)
        shown = []
        for line in whole.decode(errors="replace").splitlines():
            text = self._select(line, position)
            if text is not None:
                shown.append(text)
        return shown

    def _select(self, line: str, position: _Position) -> str | None:
        match = _RECORD.match(line)
        if match is None:
            # A record of several lines: a traceback goes with the error above it.
            return f"    {line}" if position.is_shown else None
        position.is_shown = match["level"] in _SHOWN_LEVELS
        text = match["text"]
        if position.is_shown:
            return f"{match['level'].lower()}: {match['component']}: {text}"
        if text.startswith(self._progress_mark):
            return text.removeprefix(self._progress_mark).strip()
        return None
