"""What travels through the socket of a pair: messages, each a header, a frame, perhaps a payload.

    frame_bytes     u32
    payload_bytes   u32
    place           i32: where the payload is

A payload in pieces (`transport.pieces`) has its frame told ahead, while payloads before it are
still under way: the other end then knows what to do with it before it comes. It follows a message
of its own, with no frame, in the order in which they were told; or that message says 0 bytes, and
it never comes.
"""

import struct

HEADER = struct.Struct("<IIi")

INLINE = -1  # it follows
RETURN = -2  # there is none: the frame is a list of slots of a shared ring, u16 each
GROUP = -3  # it comes over the pair's group
AHEAD = -4  # it comes with a later message, TOLD
TOLD = -5  # it follows: that of the first frame that was told ahead, of those whose has not come
# otherwise the slot of a shared ring in which it lies

MAX_FRAME_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 64 << 20  # of one chunk: a frame that announces more is no chunk of ours
MAX_TOLD = 4  # frames told ahead whose payloads are still to come; we tell 2 at most
