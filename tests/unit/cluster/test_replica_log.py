from pathlib import Path

import pytest

from cluster.replica_log import ReplicaLog

_HEAD = "2026-01-31 12:00:00,000 medley_M abc123"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "logs" / "serve"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def log(tmp_path: Path) -> ReplicaLog:
    return ReplicaLog(tmp_path, "medley", "progress: ")


def _append(folder: Path, text: str, name: str = "replica_medley_M_abc123.log") -> None:
    with (folder / name).open("a") as file:
        file.write(text)


def test_progress_is_shown_without_its_mark_and_other_information_is_not(
    folder: Path, log: ReplicaLog
) -> None:
    _append(folder, f"INFO {_HEAD} -- Started.\nINFO {_HEAD} -- progress: loading 1/2\n")

    assert log.read_new() == ["loading 1/2"]


def test_a_line_is_shown_once(folder: Path, log: ReplicaLog) -> None:
    _append(folder, f"INFO {_HEAD} -- progress: one\n")
    log.read_new()
    _append(folder, f"INFO {_HEAD} -- progress: two\n")

    assert log.read_new() == ["two"]
    assert log.read_new() == []


def test_a_line_that_is_still_being_written_is_shown_when_it_is_whole(
    folder: Path, log: ReplicaLog
) -> None:
    _append(folder, f"INFO {_HEAD} -- progress: half")

    assert log.read_new() == []

    _append(folder, " and half\n")

    assert log.read_new() == ["half and half"]


def test_an_error_is_shown_with_the_lines_that_follow_it(folder: Path, log: ReplicaLog) -> None:
    _append(
        folder,
        f"ERROR {_HEAD} 1234-abcd -- request failed\nTraceback\n  line\n"
        f"INFO {_HEAD} -- fine again\nnot shown\n",
    )

    assert log.read_new() == ["error: medley_M: request failed", "    Traceback", "      line"]


def test_other_applications_and_components_are_not_followed(folder: Path, log: ReplicaLog) -> None:
    _append(folder, f"ERROR {_HEAD} -- a\n", name="replica_other_M_abc123.log")
    _append(folder, f"ERROR {_HEAD} -- b\n", name="controller_1.log")

    assert log.read_new() == []


def test_a_folder_that_does_not_exist_yet_has_no_lines(tmp_path: Path) -> None:
    assert ReplicaLog(tmp_path / "later", "medley", "progress: ").read_new() == []
