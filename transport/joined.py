"""A frame and its payload as one protobuf message, without protobuf copying the payload.

Protobuf merges a submessage that comes twice. So a Chunk's payload is written as a second `chunk`
that holds nothing else, behind the frame as protobuf writes it: any reader of the schema
understands the message, and ours takes the payload out as it lies there.

A payload may also be built where it lies in its message, before there is a frame: room is left in
front, and what the frame does not need is filled with a field that every reader skips.
"""

import ctypes

from protos.transfer_pb2 import Chunk, Frame

Message = tuple[Frame, memoryview | None]

_LENGTH_DELIMITED = 2
_CHUNK = Frame.CHUNK_FIELD_NUMBER << 3 | _LENGTH_DELIMITED  # both tags are a single byte
_PAYLOAD = Chunk.PAYLOAD_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
LINE = 64  # of a cache: a payload that begins with one, and ends so, is written past the caches
_PADDING = bytes([0xFA, 0x7F])  # of field 2047, which no frame has

# gRPC takes nothing but bytes, and Python's C API lets who has just made some fill them.
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
    ("PyBytes_AsString", ctypes.pythonapi)
)


def join(message: Message) -> bytes:
    """The bytes of a frame, with its payload if it has one."""
    frame, payload = message
    if payload is None:
        return frame.SerializeToString()
    inner = bytes([_PAYLOAD]) + _number(payload.nbytes)
    outer = bytes([_CHUNK]) + _number(len(inner) + payload.nbytes)
    return b"".join((frame.SerializeToString(), outer, inner, payload))


class Unsent:
    """The memory of a message whose payload is built in it; whoever sends it copies it."""

    def __init__(self, payload_bytes: int) -> None:
        inner = bytes([_PAYLOAD]) + _number(payload_bytes)
        outer = bytes([_CHUNK]) + _number(len(inner) + payload_bytes) + inner
        self._front_bytes = 1024 + payload_bytes // 256  # a digest for every 2 KiB, and more
        size = self._front_bytes + len(outer) + payload_bytes
        self._raw: bytes = _new_bytes(None, size)
        beyond = (_address_of(self._raw) + size) % LINE
        if beyond:  # so much memory is likely to begin alike when it is asked for again
            self._front_bytes += LINE - beyond
            size += LINE - beyond
            self._raw = _new_bytes(None, size)
        address = _address_of(self._raw)
        self._memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        self._memory[self._front_bytes : size - payload_bytes] = outer
        self.payload = self._memory[size - payload_bytes :]

    def message(self, frame: Frame) -> bytes:
        """As `join` would make it; to be forgotten before the next payload is built here."""
        head = frame.SerializeToString()
        length = self._front_bytes - len(head) - len(_PADDING) - 4
        if length < 0:
            return join((frame, self.payload))
        last = length >> 21  # a number of four bytes, however small
        groups = [length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14 & 0x7F | 0x80, last]
        padding = b"".join((_PADDING, bytes(groups), bytes(length)))
        self._memory[: self._front_bytes] = padding + head
        return self._raw


def split(raw: bytes) -> Message:
    """The frame, and the payload of a Chunk as a view into `raw`.

    Raises google.protobuf.message.DecodeError for what is no frame.
    """
    found = _payload_at(raw)
    if found is not None:
        start, payload = found
        return Frame.FromString(raw[:start]), payload
    frame = Frame.FromString(raw)
    if not frame.HasField("chunk"):
        return frame, None
    return frame, memoryview(frame.chunk.payload)


def _payload_at(raw: bytes) -> tuple[int, memoryview] | None:
    """Where the chunk begins that holds only a payload and ends the message, if one does."""
    at = 0
    while at < len(raw):
        start = at
        at, tag = _varint(raw, at)
        if tag & 7 != _LENGTH_DELIMITED:
            return None
        at, length = _varint(raw, at)
        end = at + length
        if end == len(raw) and tag == _CHUNK and start and raw[at : at + 1] == bytes([_PAYLOAD]):
            at, length = _varint(raw, at + 1)
            return (start, memoryview(raw)[at:]) if at + length == end else None
        at = end
    return None


def _number(number: int) -> bytes:
    """As a varint."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The place behind the number that begins at `at`, and the number."""
    number = shift = 0
    while at < len(raw) and shift < 64:
        byte = raw[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return at, number
        shift += 7
    return len(raw), len(raw)  # cut off: nothing fits behind it
