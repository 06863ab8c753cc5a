"""A frame with its payload is one ordinary message to whoever knows the schema."""

import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protos.transfer_pb2 import Abort, Chunk, Frame, ShipmentKey
from transport.joined import Unsent, join, split


def frame(seq: int = 3, digests: bytes = b"12345678") -> Frame:
    key = ShipmentKey(transfer_id=b"\x32" * 16, attempt=1, prefill_epoch=7, decode_epoch=9)
    return Frame(key=key, chunk=Chunk(seq=seq, layer=2, num_blocks=1, digests=digests))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 5_000_000])
def test_a_reader_of_the_schema_finds_the_payload(size: int) -> None:
    payload = bytes(range(256)) * (size // 256 + 1)
    read = Frame.FromString(join((frame(), memoryview(payload)[:size])))
    want = frame()
    want.chunk.payload = payload[:size]
    assert read == want


@given(seq=st.integers(0, 2**32 - 1), digests=st.binary(max_size=300), payload=st.binary())
def test_what_is_joined_is_split_again(seq: int, digests: bytes, payload: bytes) -> None:
    found, view = split(join((frame(seq, digests), memoryview(payload))))
    assert found == frame(seq, digests)
    assert view is not None and bytes(view) == payload


def test_a_payload_is_not_copied_out_of_its_message() -> None:
    raw = join((frame(), memoryview(b"x" * 1000)))
    _, view = split(raw)
    assert view is not None and view.obj is raw


@given(
    digests=st.binary(max_size=2000),
    payloads=st.lists(st.binary(min_size=9, max_size=9), min_size=1),
)
def test_a_payload_built_in_its_message_is_read_like_any_other(
    digests: bytes, payloads: list[bytes]
) -> None:
    unsent = Unsent(9)
    for seq, payload in enumerate(payloads):
        unsent.payload[:] = payload
        raw = bytearray(unsent.message(frame(seq, digests)))
        found, view = split(bytes(raw))
        found.DiscardUnknownFields()
        assert found == frame(seq, digests)
        assert view is not None and bytes(view) == payload
        assert Frame.FromString(bytes(raw)).chunk.payload == payload


@given(payload=st.binary(max_size=300))
def test_what_protobuf_itself_wrote_is_understood(payload: bytes) -> None:
    whole = frame()
    whole.chunk.payload = payload
    found, view = split(whole.SerializeToString())
    assert found.chunk.seq == 3
    assert view is not None and bytes(view) == payload


def test_a_frame_without_a_chunk_has_no_payload() -> None:
    abort = Frame(key=frame().key, abort=Abort(reason="it left", code="CANCELLED"))
    assert split(join((abort, None))) == (abort, None)


@given(raw=st.binary(max_size=200), cut=st.integers(0, 200))
def test_bytes_that_are_no_frame_are_refused_as_protobuf_refuses_them(raw: bytes, cut: int) -> None:
    joined = join((frame(), memoryview(raw)))
    for damaged in (raw, joined[:cut], joined[:cut] + raw):
        with contextlib.suppress(DecodeError):
            split(damaged)
