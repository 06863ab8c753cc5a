import asyncio
import socket

from protos.transfer_pb2 import Chunk, Frame
from transport.frame_socket import FrameSocket
from transport.messages import HEADER, INLINE


def read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        piece = sock.recv(num_bytes - len(data))
        assert piece, "the socket closed early"
        data += piece
    return bytes(data)


async def test_a_frame_never_slips_into_a_payload_whose_sender_stopped_waiting() -> None:
    payload = memoryview(bytes([7]) * (2 << 20))  # more than the socket takes at once
    big = Frame(chunk=Chunk(seq=1))
    raw = big.SerializeToString()
    whole = HEADER.pack(len(raw), payload.nbytes, INLINE) + raw + payload
    small = HEADER.pack(5, 0, INLINE) + b"small"
    for made_room in range(1, 21):
        ours, theirs = socket.socketpair()
        stream = FrameSocket(ours)

        def fill(room: memoryview) -> Frame:
            room[:] = payload
            return big

        sending = stream.load(payload.nbytes, fill)
        start = await asyncio.to_thread(read_exactly, theirs, made_room * 7_000)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        following = stream.send(b"small")
        rest = await asyncio.to_thread(read_exactly, theirs, len(whole) + len(small) - len(start))
        assert start + rest == whole + small
        if following is not None:
            await following
        stream.close()
        theirs.close()


async def test_a_payload_of_no_bytes_is_filled_and_sent_as_any_other() -> None:
    ours, theirs = socket.socketpair()
    stream, frame = FrameSocket(ours), Frame(chunk=Chunk(seq=1))

    def fill(room: memoryview) -> Frame:
        room[:] = b""
        return frame

    await stream.load(0, fill)
    raw = frame.SerializeToString()
    whole = HEADER.pack(len(raw), 0, INLINE) + raw
    assert await asyncio.to_thread(read_exactly, theirs, len(whole)) == whole
    stream.close()
    theirs.close()
