"""A frame and its payload as one protobuf message, without protobuf copying the payload.

Protobuf merges a submessage that comes twice. So a Chunk's payload is written as a second `chunk`
that holds nothing else, behind the frame as protobuf writes it: any reader of the schema
understands the message, and ours takes the payload out as it lies there.
"""

from protos.transfer_pb2 import Chunk, Frame

Message = tuple[Frame, memoryview | None]

_LENGTH_DELIMITED = 2
_CHUNK = Frame.CHUNK_FIELD_NUMBER << 3 | _LENGTH_DELIMITED  # both tags are a single byte
_PAYLOAD = Chunk.PAYLOAD_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


def join(message: Message) -> bytes:
    """The bytes of a frame, with its payload if it has one."""
    frame, payload = message
    if payload is None:
        return frame.SerializeToString()
    inner = bytes([_PAYLOAD]) + _number(payload.nbytes)
    outer = bytes([_CHUNK]) + _number(len(inner) + payload.nbytes)
    return b"".join((frame.SerializeToString(), outer, inner, payload))


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
        start, tag = at, raw[at]
        if tag & 7 != _LENGTH_DELIMITED or tag & 0x80:
            return None
        at, length = _varint(raw, at + 1)
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
