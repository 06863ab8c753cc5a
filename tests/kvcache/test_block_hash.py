import hashlib
import os
import random
import struct
import subprocess
import sys
import time

import pytest

from kvcache.block_hash import (
    PUBLIC,
    BlockHash,
    Namespace,
    hash_block,
    index_key,
    index_names,
    name_blocks,
    namespace,
    tenant_key,
)

SPACE = namespace(weights=b"w" * 16, config=b"c", tokenizer=b"t", adapter="", cache=b"s" * 16)
ALICE = tenant_key("alice")
TOKENS = list(range(64))

PUBLIC_NAMES = [
    "e708e9974e5c6aa39d052f536ff2d3e045d699df73acffb8d99541be737516df",
    "7fde2b95c7f3c0cf85a48c0b00f521f8ee4ec3f9daf2c2cac83295e127a6c5c6",
    "83449817d513eb8de014771371990bc36f8559cbe20d772802f2a79aa780f192",
    "cfd750938f2af94dfb09134f720bc006335547eb5f3871420e124028953ad03f",
]
ALICE_NAMES = [
    "77ea19332ee8bb4632244efd83fc3ed1b6e20c19d720a27c1f4e72c3b22340ee",
    "c68f7bd43da3c78d88c0979e3476c6d9063a551941566d356cdc81406aabefa1",
    "e07f1300cda03f314692df5e69c9154bda5da86de3c80fb6e057723226197ce5",
    "52498e03073f63ec06ef8122c197f9567b93a3f4c3fb75e5d827e16fd12f0d80",
]


def test_the_names_of_a_known_prompt() -> None:
    assert SPACE.hex() == "902075bb0d3fe40db2f8b64df490184e5ffa8abaee29419a852c89b54fd1c2de"
    assert PUBLIC.hex() == "0c9c94c7212b24486d5fecf577781411a288e50564283b0a1b526f3d5d61a313"
    assert ALICE.hex() == "e67facd1daac94fee248713dd2bf5e2203a181898ca9ad06f5d1d9a800ae0248"
    assert [name.hex() for name in name_blocks(SPACE, PUBLIC, TOKENS, 16)] == PUBLIC_NAMES
    assert [name.hex() for name in name_blocks(SPACE, ALICE, TOKENS, 16)] == ALICE_NAMES
    pictured = hash_block(SPACE, PUBLIC, None, TOKENS[:16], extra=b"image")
    assert pictured.hex() == "68623cbff7a1e81be0259e82a2960f0281d4796341caa4fd3fd3666166e5079e"


def test_the_index_knows_a_block_by_the_first_half_of_its_name() -> None:
    (name,) = name_blocks(SPACE, PUBLIC, TOKENS[:16], 16)
    assert index_key(name).hex() == PUBLIC_NAMES[0][:32]


def test_a_name_is_keyed_blake2b_over_length_prefixed_fields() -> None:
    def field(value: bytes) -> bytes:
        return struct.pack("<I", len(value)) + value

    parent = bytes(range(32))
    tokens = struct.pack("<3I", 7, 0, 2**32 - 1)
    fields = (b"kvferry block 1", SPACE, parent, tokens, b"more")
    digest = hashlib.blake2b(b"".join(map(field, fields)), key=ALICE, digest_size=32)
    named = hash_block(SPACE, ALICE, BlockHash(parent), [7, 0, 2**32 - 1], extra=b"more")
    assert named == digest.digest()


def test_three_processes_of_different_hash_seeds_give_one_prompt_the_same_names() -> None:
    code = (
        "from kvcache.block_hash import *\n"
        "space = namespace(weights=b'w' * 16, config=b'c', tokenizer=b't', adapter='',"
        " cache=b's' * 16)\n"
        "print(*(name.hex() for name in name_blocks(space, PUBLIC, range(64), 16)))\n"
    )
    for seed in (None, "0", "random"):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        env |= {"PYTHONHASHSEED": seed} if seed else {}
        env["PYTHONPATH"] = os.getcwd()
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == PUBLIC_NAMES


def test_a_name_depends_on_every_earlier_token() -> None:
    before = name_blocks(SPACE, PUBLIC, TOKENS, 16)
    for changed in range(64):
        tokens = [*TOKENS[:changed], 999, *TOKENS[changed + 1 :]]
        after = name_blocks(SPACE, PUBLIC, tokens, 16)
        same = [a == b for a, b in zip(before, after, strict=True)]
        assert same == [block < changed // 16 for block in range(4)]


def test_prompts_that_meet_in_their_last_block_share_nothing() -> None:
    x, a, y, b, z = (list(range(n, n + 16)) for n in (0, 100, 200, 300, 400))
    first = name_blocks(SPACE, PUBLIC, x + a + z, 16)
    second = name_blocks(SPACE, PUBLIC, y + b + z, 16)
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("num_tokens", "num_names"), [(0, 0), (15, 0), (16, 1), (17, 1), (32, 2), (48, 3)]
)
def test_only_full_blocks_have_names(num_tokens: int, num_names: int) -> None:
    assert len(name_blocks(SPACE, PUBLIC, TOKENS[:num_tokens], 16)) == num_names


def test_one_block_at_a_time_gives_the_chain() -> None:
    parent: BlockHash | None = None
    for start, name in zip(range(0, 64, 16), name_blocks(SPACE, ALICE, TOKENS, 16), strict=True):
        parent = hash_block(SPACE, ALICE, parent, TOKENS[start : start + 16])
        assert parent == name


@pytest.mark.parametrize(
    ("num_public", "num_shared"), [(0, 0), (15, 0), (16, 1), (47, 2), (63, 3), (64, 4), (900, 4)]
)
def test_blocks_that_are_public_whole_are_everyones_and_what_follows_is_the_tenants(
    num_public: int, num_shared: int
) -> None:
    found = name_blocks(SPACE, ALICE, TOKENS, 16, num_public)
    assert [name.hex() for name in found[:num_shared]] == PUBLIC_NAMES[:num_shared]
    parent = found[num_shared - 1] if num_shared else None
    for at in range(num_shared, 4):
        parent = hash_block(SPACE, ALICE, parent, TOKENS[16 * at : 16 * at + 16])
        assert found[at] == parent
    bobs = name_blocks(SPACE, tenant_key("bob"), TOKENS, 16, num_public)
    assert set(bobs) & set(found) == set(found[:num_shared])
    assert index_names(SPACE, ALICE, TOKENS, 16, num_public) == [each[:16] for each in found]


def test_a_tenant_named_like_an_adapter_is_not_that_adapter() -> None:
    def space(adapter: str) -> Namespace:
        return namespace(weights=b"w", config=b"c", tokenizer=b"t", adapter=adapter, cache=b"s")

    salted = name_blocks(space(""), tenant_key("smol-v2"), TOKENS, 16)
    adapted = name_blocks(space("smol-v2"), PUBLIC, TOKENS, 16)
    both = name_blocks(space("smol-v2"), tenant_key("smol-v2"), TOKENS, 16)
    plain = name_blocks(space(""), PUBLIC, TOKENS, 16)
    assert len({*salted, *adapted, *both, *plain}) == 16


def test_no_part_of_a_namespace_can_pass_for_its_neighbour() -> None:
    parts = {"weights": b"a", "config": b"b", "tokenizer": b"c", "adapter": "d", "cache": b"e"}
    moved = {"weights": b"ab", "config": b"", "tokenizer": b"c", "adapter": "d", "cache": b"e"}
    assert namespace(**parts) != namespace(**moved)  # type: ignore[arg-type]
    for part, value in parts.items():
        longer = value + value[:1]  # type: ignore[operator]
        assert namespace(**parts) != namespace(**{**parts, part: longer})  # type: ignore[arg-type]


def test_no_identity_is_the_public_one() -> None:
    assert PUBLIC not in {tenant_key(name) for name in ("PUBLIC", "public", "0", " ")}
    with pytest.raises(ValueError, match="identity is empty"):
        tenant_key("")


def test_the_block_size_is_part_of_a_name() -> None:
    assert not set(name_blocks(SPACE, PUBLIC, TOKENS, 8)) & set(
        name_blocks(SPACE, PUBLIC, TOKENS, 16)
    )


def test_extra_cannot_pass_for_tokens() -> None:
    token = struct.pack("<I", 5)
    assert hash_block(SPACE, PUBLIC, None, [1, 5]) != hash_block(SPACE, PUBLIC, None, [1], token)
    assert hash_block(SPACE, PUBLIC, None, [1]) != hash_block(
        SPACE, PUBLIC, BlockHash(b"\0" * 16), [1]
    )


@pytest.mark.parametrize("token_id", [-1, 2**32, 1.5, "7"])
def test_what_is_no_token_id_has_no_name(token_id: object) -> None:
    with pytest.raises((OverflowError, TypeError)):
        hash_block(SPACE, PUBLIC, None, [token_id])  # type: ignore[list-item]


def test_two_thousand_random_prompts_have_names_of_their_own() -> None:
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(49_152) for _ in range(32)) for _ in range(2_000)]
    names = [name for prompt in prompts for name in name_blocks(SPACE, PUBLIC, prompt, 16)]
    assert {len(name) for name in names} == {32}
    assert len(set(names)) == 4_000
    assert len({name[:1] for name in names}) == 256  # any shorter name would collide


def test_a_long_prompt_is_named_in_milliseconds() -> None:
    tokens = list(range(8_192))
    took = min(_seconds(lambda: name_blocks(SPACE, PUBLIC, tokens, 16)) for _ in range(5))
    assert took < 0.02, f"{took * 1e3:.1f} ms"


def _seconds(action: object) -> float:
    start = time.perf_counter()
    action()  # type: ignore[operator]
    return time.perf_counter() - start
