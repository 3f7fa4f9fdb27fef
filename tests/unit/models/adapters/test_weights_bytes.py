"""Bytes that are not exactly a safetensors file of the right shapes are refused unallocated."""

import json
import struct

import pytest
from safetensors.torch import save

from tests.unit.models.adapters.peft_adapters import parse, refusal, tensors_of

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def with_header(header, data=b""):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def entry(**changes):
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (b"", "no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS"),
        (struct.pack("<Q", 1 << 62) + b"{}", "no safetensors file"),
        (struct.pack("<Q", 0), "no safetensors file"),
        (with_header(b"{"), "damaged header"),
        (with_header(b"[]"), "damaged header"),
        (with_header(b"[" * 100_000), "damaged header"),
        (with_header({"a": []}), "damaged header"),
        (with_header({"a": {}}), "damaged header"),
        (with_header({"a": entry(dtype=5)}), "damaged header"),
        (with_header({"a": entry(shape=[-1, 2])}), "damaged header"),
        (with_header({"a": entry(shape=[True])}), "damaged header"),
        (with_header({"a": entry(shape=[2.0])}), "damaged header"),
        (with_header({"a": entry(shape=[1 << 60])}), "damaged header"),
        (with_header({"a": entry(shape=[1] * 5000)}), "damaged header"),
        (with_header({"a": entry(dtype="I64")}), "stored as I64"),
        (with_header({"a": entry(dtype="F8_E4M3")}), "stored as F8_E4M3"),
        (with_header({"a": entry()}, bytes(15)), "header tells of"),
        (with_header({"a": entry()}, bytes(17)), "header tells of"),
        (with_header({"a": entry(shape=[1 << 30, 1 << 30])}, bytes(16)), "header tells of"),
        (with_header({"a": entry()}, bytes(16)), "not named as PEFT names them"),
    ],
)
def test_bytes_that_are_no_safetensors_file_are_refused(weights, words):
    assert words in refusal(lambda: parse(weights))


def test_tensors_that_share_their_bytes_are_refused():
    encoded = save(tensors_of())
    num_header_bytes = struct.unpack("<Q", encoded[:8])[0]
    header = json.loads(encoded[8 : 8 + num_header_bytes])
    for value in header.values():
        value["data_offsets"] = [0, 512]

    assert "damaged" in refusal(lambda: parse(with_header(header, encoded[8 + num_header_bytes :])))


def test_a_tensor_that_is_there_twice_is_refused():
    encoded = save(tensors_of())
    num_header_bytes = struct.unpack("<Q", encoded[:8])[0]
    header, data = encoded[8 : 8 + num_header_bytes], encoded[8 + num_header_bytes :]
    other = f'{{"{Q0}.lora_A.weight":{json.dumps(entry(shape=[64, 2], data_offsets=[0, 512]))},'
    assert parse(with_header(header.rstrip(), data)).rank == 2

    twice = other.encode() + header.rstrip()[1:]

    assert "damaged header" in refusal(lambda: parse(with_header(twice, data)))


def test_every_cut_of_a_good_file_is_refused():
    encoded = save(tensors_of())
    assert parse(encoded).rank == 2

    for end in [*range(0, 200, 7), len(encoded) // 2, len(encoded) - 1]:
        refusal(lambda end=end: parse(encoded[:end]))


def test_metadata_is_no_tensor():
    assert parse(save(tensors_of(), metadata={"format": "pt", "x": "y"})).rank == 2


def test_no_matter_what_a_header_claims_nothing_large_is_allocated(monkeypatch):
    def explode(encoded):
        pytest.fail("tensors were loaded before their shapes were checked")

    monkeypatch.setattr("safetensors.torch.load", explode)

    assert "lora_A.weight is [9, 64]" in refusal(lambda: parse(save(tensors_of(config_rank=9))))
