"""Block identity: a full block is named by its own tokens and by every token before it.

A name is `BLAKE2b-256(key = tenant key, domain | namespace | parent | tokens | extra)`, every field
preceded by its length as u32 LE, tokens as u32 LE. The same bytes come out of every process, host
and Python version; `hash()` has no part in it. The namespace says everything that decides what KV
values a token gives; the tenant key keeps one caller's names from being found by another, but for
the first blocks of a prompt that are said to be everyone's. Workers whose blocks differ in size
share a namespace and not one name, since a name covers its tokens.

The owner of a block knows it by its whole name, so a hit needs no further proof that the tokens are
the same. The index, whose entries are hints, gets the first half: two prompts that collide there
cost a wrong guess and nothing else.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import NewType

from kernels.chained_digests import DIGEST_BYTES, chained_digests

BlockHash = NewType("BlockHash", bytes)  # 32 bytes; 16 in the index
TenantKey = NewType("TenantKey", bytes)  # 32 bytes
Namespace = NewType("Namespace", bytes)  # 32 bytes

FORMAT = b"kvferry block 1"  # changes whenever the same tokens must get another name
INDEX_KEY_BYTES = 16
_INDEX_KEYS = struct.Struct(f"{INDEX_KEY_BYTES}s{DIGEST_BYTES - INDEX_KEY_BYTES}x")

PUBLIC = TenantKey(hashlib.blake2b(b"", digest_size=32, person=b"kvferry.public").digest())
"""The key of prompts everyone may share, and of a cluster without authentication."""


def tenant_key(identity: str) -> TenantKey:
    """The key of one caller, from who it is (an API key, a certificate), never from its request."""
    if not identity:
        raise ValueError("a tenant's identity is empty; shared prompts are named under PUBLIC")
    digest = hashlib.blake2b(identity.encode(), digest_size=32, person=b"kvferry.tenant")
    return TenantKey(digest.digest())


def namespace(
    *, weights: bytes, config: bytes, tokenizer: bytes, adapter: str, cache: bytes
) -> Namespace:
    """Digest everything that decides the KV values of a token: equal namespaces may share blocks.

    Takes the fingerprints of the weights, the model's configuration and the tokenizer, the
    adapter's name ("" for none) and `CacheSpec.fingerprint()`.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"kvferry.space")
    for part in (FORMAT, weights, config, tokenizer, adapter.encode(), cache):
        digest.update(_field(part))
    return Namespace(digest.digest())


def hash_block(
    namespace: Namespace,
    tenant: TenantKey,
    parent: BlockHash | None,
    token_ids: Sequence[int],
    extra: bytes = b"",
) -> BlockHash:
    """Name one full block. `parent` is the block before it, None for the first of a prompt.

    `extra` is whatever else its KV depends on (an image, an embedding). Ids must fit u32.
    """
    fields = (parent or b"", _token_bytes(token_ids), extra)
    message = _head(namespace) + b"".join(map(_field, fields))
    return BlockHash(hashlib.blake2b(message, key=tenant, digest_size=DIGEST_BYTES).digest())


def name_blocks(
    namespace: Namespace,
    tenant: TenantKey,
    token_ids: Sequence[int],
    block_size: int,
    num_public_tokens: int = 0,
) -> list[BlockHash]:
    """The chained name of each full block, in order; a partial tail has no name.

    Blocks that lie whole within the first `num_public_tokens` are named under PUBLIC, whoever asks;
    those behind them go on from there under `tenant`.
    """
    digests = _chain(namespace, tenant, token_ids, block_size, num_public_tokens)
    return [
        BlockHash(digests[start : start + DIGEST_BYTES])
        for start in range(0, len(digests), DIGEST_BYTES)
    ]


def index_names(
    namespace: Namespace,
    tenant: TenantKey,
    token_ids: Sequence[int],
    block_size: int,
    num_public_tokens: int = 0,
) -> list[BlockHash]:
    """`name_blocks`, each name as the prefix index knows it."""
    digests = _chain(namespace, tenant, token_ids, block_size, num_public_tokens)
    return [name for (name,) in _INDEX_KEYS.iter_unpack(digests)]


def index_key(name: BlockHash) -> BlockHash:
    """What the prefix index knows a block by."""
    return BlockHash(name[:INDEX_KEY_BYTES])


def _chain(
    namespace: Namespace,
    tenant: TenantKey,
    token_ids: Sequence[int],
    block_size: int,
    num_public_tokens: int,
) -> bytes:
    head, items, width = _head(namespace), _token_bytes(token_ids), block_size * 4
    if num_public_tokens < block_size:
        return chained_digests(tenant, head, items, width)
    cut = num_public_tokens // block_size * width
    shared = chained_digests(PUBLIC, head, items[:cut], width)
    return shared + chained_digests(tenant, head, items[cut:], width, shared[-DIGEST_BYTES:])


def _head(namespace: Namespace) -> bytes:
    return _field(FORMAT) + _field(namespace)


def _field(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    tokens = array("I", token_ids)
    assert tokens.itemsize == 4
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()
