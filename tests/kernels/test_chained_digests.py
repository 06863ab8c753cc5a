"""The compiled chain is the reference's, byte for byte."""

import random

import pytest

from kernels.chained_digests import _load, chained_digests, chained_digests_reference


def test_the_compiler_that_make_needs_gives_the_compiled_chain() -> None:
    assert _load() is not None


@pytest.mark.parametrize("width", [1, 4, 63, 64, 116, 117, 128, 244, 512, 1000])
@pytest.mark.parametrize("head_bytes", [0, 1, 55, 84, 128, 300])
def test_chains_of_any_shape_are_the_reference_s(width: int, head_bytes: int) -> None:
    """Whatever falls on, before or behind the edge of a block of 128 bytes."""
    rng = random.Random(width * 1000 + head_bytes)
    key, head = rng.randbytes(32), rng.randbytes(head_bytes)
    for num_bytes in (0, width - 1, width, 3 * width, 5 * width + width // 2):
        items = rng.randbytes(num_bytes)
        found = chained_digests(key, head, items, width)
        assert found == chained_digests_reference(key, head, items, width)
        assert len(found) == num_bytes // width * 32
        rest = chained_digests(key, head, items[2 * width :], width, found[32:64])
        assert rest == found[64:], "a chain goes on from where it was cut"
