"""Records travel whole, and manifests say in one sentence why two workers do not fit."""

import json
from dataclasses import replace
from typing import Any

import pytest

from prefix_index.index import Load, MalformedRecord, WorkerRecord
from tests.prefix_index.samples import IDLE, MANIFEST, worker


def test_a_record_survives_json() -> None:
    assert WorkerRecord.from_json(worker().to_json()) == worker()
    assert Load.from_json(IDLE.to_json()) == IDLE


def test_a_record_of_a_newer_version_is_read_without_its_new_fields() -> None:
    newer = {**json.loads(worker().to_json()), "zone": "eu-1"}
    newer["manifest"]["codec"] = "fp8"
    assert WorkerRecord.from_json(json.dumps(newer)) == worker()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"", "record: Invalid JSON"),
        (b"\xff\xfe", "record: Invalid JSON"),
        (b"[]", "record: Input should be"),
        (b'{"name": "w0"}', "role: "),
        (worker().to_json().replace(b'"prefill"', b'"both"'), "role: Input should be"),
        (worker().to_json().replace(b'"running":0', b'"running":"a"'), "load.running: "),
        (worker().to_json().replace(b'"w0"', b'""'), "1 to 200 characters"),
        (worker().to_json().replace(b'"epoch":1', b'"epoch":-1'), "epoch -1 is negative"),
    ],
)
def test_a_foreign_record_is_refused_with_the_place(text: bytes, complaint: str) -> None:
    with pytest.raises(MalformedRecord, match=complaint):
        WorkerRecord.from_json(text)


def test_equal_manifests_fit() -> None:
    assert MANIFEST.mismatch(MANIFEST) is None


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("protocol", 2, "protocol differs: 1 here, 2 there"),
        ("namespace", "cd", f"namespace differs: {'ab' * 32} here, cd there"),
        ("dtype", "float16", "dtype differs: float32 here, float16 there"),
        ("weights", "int8", "weights differs: dense here, int8 there"),
        ("num_layers", 32, "num_layers differs: 30 here, 32 there"),
        ("num_query_heads", 8, "num_query_heads differs: 9 here, 8 there"),
        ("num_kv_heads", 9, "num_kv_heads differs: 3 here, 9 there"),
        ("head_dim", 128, "head_dim differs: 64 here, 128 there"),
        ("max_context", 512, "max_context differs: 8192 here, 512 there"),
        ("vocab_size", 512, "vocab_size differs: 49152 here, 512 there"),
    ],
)
def test_a_manifest_names_the_field_that_differs(field: str, value: Any, sentence: str) -> None:
    other = replace(MANIFEST, **{field: value})
    assert MANIFEST.mismatch(other) == sentence
    assert MANIFEST.digest() != other.digest()


@pytest.mark.parametrize("block_size", [1, 2, 8, 32, 128])
@pytest.mark.parametrize("kv_layout", ["head-major", "token-major"])
def test_blocks_of_another_size_or_layout_fit(block_size: int, kv_layout: str) -> None:
    other = replace(MANIFEST, block_size=block_size, kv_layout=kv_layout)
    assert MANIFEST.mismatch(other) is None and other.mismatch(MANIFEST) is None
    assert MANIFEST.digest() == other.digest()


@pytest.mark.parametrize("block_size", [0, -16, 24, 256])
def test_a_size_that_no_block_has_does_not_fit(block_size: int) -> None:
    other = replace(MANIFEST, block_size=block_size)
    sentence = f"block_size {block_size} is not a power of two up to 128"
    assert MANIFEST.mismatch(other) == other.mismatch(MANIFEST) == sentence


def test_two_workers_need_one_wire_in_common() -> None:
    assert MANIFEST.mismatch(replace(MANIFEST, wires=("gloo", "nccl"))) is None
    assert (
        MANIFEST.mismatch(replace(MANIFEST, wires=("nccl",)))
        == "wires differ: grpc, gloo here, nccl there, none shared"
    )


def test_shared_memory_alone_does_not_join_two_hosts() -> None:
    here = replace(MANIFEST, wires=("shm",), host="host-a")
    assert here.mismatch(here) is None
    assert here.mismatch(replace(here, host="host-b")) == (
        "wires differ: shm here, shm there, none shared, on different hosts"
    )


def test_a_record_from_before_hosts_were_named_is_read() -> None:
    text = json.loads(worker().to_json())
    del text["manifest"]["host"]
    assert WorkerRecord.from_json(json.dumps(text)).manifest.host == ""


def test_labels_and_wires_are_not_part_of_the_digest() -> None:
    other = replace(MANIFEST, model="/models/smollm2.gguf", wires=("nccl",))
    assert other.digest() == MANIFEST.digest()
    assert MANIFEST.digest().hex() == "0630c8bf5b00be115067bbacaf09c9db"
