"""medley hash-key: the record that it prints opens the door for the key, and is all it prints."""

import io
from pathlib import Path

import pytest

from cluster.launch import EXIT_MISUSE, main
from deployments.key_file import read_keys


def test_a_drawn_key_is_shown_once_and_its_record_can_be_appended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.yaml"
    keys = {}
    for name in ("team-a", "123", "no"):
        assert main(["hash-key", name]) == 0
        printed = capsys.readouterr()
        keys[name] = printed.err.split()[-1]
        with path.open("a") as file:
            file.write(printed.out)

    ring = read_keys(path)

    assert len(set(keys.values())) == 3
    for name, key in keys.items():
        found = ring.find(f"Bearer {key}")
        assert found is not None
        assert found.name == name
        assert len(key) > 40
        assert key not in path.read_text()


def test_a_key_of_ones_own_is_read_from_standard_input_and_never_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "my-own-long-key-0123"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n"))

    assert main(["hash-key", "mine", "--stdin"]) == 0

    printed = capsys.readouterr()
    path = tmp_path / "keys.yaml"
    path.write_text(printed.out)
    found = read_keys(path).find(f"Bearer {key}")
    assert found is not None
    assert key not in printed.out + printed.err


@pytest.mark.parametrize("key", ["", "short", "with a space in it somewhere", "ä" * 20])
def test_a_key_that_no_header_can_carry_or_anybody_can_guess_is_refused_untold(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n"))

    assert main(["hash-key", "mine", "--stdin"]) == EXIT_MISUSE

    printed = capsys.readouterr()
    assert printed.out == ""
    assert "key: must be 16 to 512" in printed.err
    assert not key or key not in printed.err


def test_a_name_must_be_one_that_the_file_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hash-key", "two words"]) == EXIT_MISUSE
    assert "name: must be 1 to 128" in capsys.readouterr().err
