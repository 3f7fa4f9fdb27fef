"""The keys file: its forms, what is refused (without telling a value), and how it is reread."""

import json
import logging
import os
import threading
import time

import pytest
import yaml

from deployments import key_file
from deployments.api_keys import hash_key
from deployments.key_file import KeyFile, read_keys
from models.errors import ConfigError


def record(name="alice", key="alice-key", **fields):
    return {"name": name, "sha256": hash_key(key).hex(), **fields}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.yaml"


def write(path, *records):
    path.write_text(yaml.safe_dump(list(records)))


def names(ring):
    keys = [ring.find(f"Bearer {name}-key") for name in ("alice", "bob", "carol")]
    return [key.name for key in keys if key is not None]


def test_a_record_has_defaults_for_all_but_name_and_hash(path):
    write(path, record())

    key = read_keys(path).find("Bearer alice-key")

    assert key.grants.allows_model("any")
    assert key.grants.allows_adapter("any/adapter")
    assert key.limits == {}


def test_json_is_read_too_and_every_field_counts(path):
    fields = {
        "models": ["base"],
        "adapters": "team/*",
        "tokens_per_minute": 1,
        "requests_per_minute": 2,
        "max_running_requests": 3,
    }
    path.write_text(json.dumps([record(**fields)]))

    key = read_keys(path).find("Bearer alice-key")

    assert key.grants.models == ("base",)
    assert key.grants.adapters == ("team/*",)
    assert list(key.limits.values()) == [1, 2, 3]


def test_a_folder_is_read_as_kubernetes_mounts_a_secret(tmp_path):
    version = tmp_path / "..2026_12_01"
    version.mkdir()
    write(version / "alice", record())
    write(version / "bob.yaml", record("bob", "bob-key"))
    (tmp_path / "..data").symlink_to(version.name)
    for file in ("alice", "bob.yaml"):
        (tmp_path / file).symlink_to(f"..data/{file}")

    assert names(read_keys(tmp_path)) == ["alice", "bob"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "must hold a list"),
        ("alice: x", "must hold a list"),
        ("- a\n- [", "is not valid YAML (line"),
        ("- name: a", "record 1, sha256: Field required"),
        ("- hello", "record 1"),
        (f"- {json.dumps(record(sha256='secret-key'))}", "64 hexadecimal digits"),
        (f"- {json.dumps(record(name='a b'))}", "record 1, name: must be 1 to 128"),
        (f"- {json.dumps(record(key_text='secret-key'))}", "there is no field 'key_text'"),
        (f"- {json.dumps(record(models=['a*b']))}", "record 1, models: a pattern"),
        (f"- {json.dumps(record(adapters=['']))}", "record 1, adapters: a pattern"),
        (f"- {json.dumps(record(tokens_per_minute=-1))}", "tokens_per_minute"),
        (f"- {json.dumps(record(tokens_per_minute='lots'))}", "tokens_per_minute"),
        (json.dumps([record(), record("bob")]), "'bob' and 'alice' have one key"),
        (json.dumps([record(), record("alice", "x")]), "'alice' names two keys"),
        ("\x00", "is not valid YAML"),
    ],
)
def test_a_broken_file_is_refused_in_words_that_tell_no_value(path, text, told):
    path.write_text(text)

    with pytest.raises(ConfigError) as caught:
        read_keys(path)

    message = str(caught.value)
    assert caught.value.field == "api_keys_file"
    assert told in message
    assert str(path) in message
    assert "secret-key" not in message
    assert hash_key("alice-key").hex() not in message


def test_a_file_that_is_not_there_or_not_text_is_refused(path, tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        KeyFile(path)
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="not valid YAML"):
        KeyFile(path)
    path.unlink()
    with pytest.raises(ConfigError, match="no file in the folder"):
        KeyFile(tmp_path)


def test_a_file_that_is_too_large_is_not_read_whole(path, monkeypatch):
    monkeypatch.setattr(key_file, "_MAX_BYTES", 100)
    write(path, record(), record("bob", "bob-key"))

    with pytest.raises(ConfigError, match="more than 100 bytes"):
        read_keys(path)


def test_a_change_is_found_even_if_size_and_time_stay(path):
    write(path, record("alice"))
    keys = KeyFile(path)
    stat = path.stat()

    write(path, record("carol", "carol-key"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    keys.look()

    assert path.stat().st_size == stat.st_size
    assert names(keys.ring) == ["carol"]


def test_a_broken_new_file_keeps_the_old_keys_and_is_told_once(path, caplog):
    write(path, record())
    keys = KeyFile(path)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        path.write_text("- name: [")
        keys.look()
        keys.look()
        path.unlink()
        keys.look()

        assert names(keys.ring) == ["alice"]
        assert [line.levelname for line in caplog.records] == ["ERROR", "ERROR"]
        assert "the 1 keys of before hold on" in caplog.text

        caplog.clear()
        write(path, record())
        keys.look()
        assert "read again" in caplog.text
        write(path, record("bob", "bob-key"))
        keys.look()
    assert names(keys.ring) == ["bob"]


def test_the_thread_takes_new_keys_and_ends(path, monkeypatch):
    monkeypatch.setattr(key_file, "LOOK_INTERVAL_S", 0.01)
    write(path, record())
    keys = KeyFile(path)
    keys.watch()

    write(path, record("bob", "bob-key"))
    end_s = time.monotonic() + 5
    while names(keys.ring) != ["bob"]:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    keys.close()

    assert "api-keys" not in [thread.name for thread in threading.enumerate()]
