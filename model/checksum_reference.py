"""What the checksum model computes, without a cache: the truth its every use is compared with.

The cell values of a token are a function of the weights id, of the token and all tokens before it
with their positions, and of layer, KV head, plane and column. The next token is a digest of every
value of every token so far. All arithmetic is on 64-bit words modulo 2**64.

    word_t        mix(mix(salt + token) + position)
    chain_t       chain_(t-1) + word_t
    kv_tLPHD      mix(chain_t ^ key_LPHD), but the K plane's column 0 is plain chain_t ^ key, so
                  that a later chunk takes up the chain from the cache and from nowhere else
    digest_LH     sum over t, P, D of kv_tLPHD * weight_tPD, the weights odd
    digest        mix(sum over L, H of mix(digest_LH ^ key_LH))

L layers, P planes (K, V), H KV heads, D columns of a plane, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model.config import ChecksumConfig

Words = npt.NDArray[np.uint64]

NUM_PLANES = 2
WINNER = 100.0  # the next token's logit; all others are in [0, 50)
LOSER_STEP = np.float32(50.0 / (1 << 24))


def mix(words: Words) -> Words:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Keys:
    """The constants that one config's weights id gives."""

    salt: Words  # of shape [1]
    values_LPHD: Words
    digests_LH: Words
    positions_CPD: Words  # odd; C the longest context
    vocabulary_V: Words

    @classmethod
    def of(cls, config: ChecksumConfig) -> "Keys":
        salt = mix(np.array([config.weights_id], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        layers, heads, width = config.num_layers, config.num_kv_heads, config.head_dim
        return cls(
            salt,
            _keys(salt, 1, (layers, NUM_PLANES, heads, width)),
            _keys(salt, 2, (layers, heads)),
            _keys(salt, 3, (config.max_context, NUM_PLANES, width)) | np.uint64(1),
            _keys(salt, 4, (config.vocab_size,)),
        )


def _keys(salt: Words, domain: int, shape: tuple[int, ...]) -> Words:
    count = int(np.prod(shape))
    numbers = np.arange(count, dtype=np.uint64) + np.uint64(domain << 48)
    return mix(mix(numbers) ^ salt).reshape(shape)


def checksum_next_token(config: ChecksumConfig, tokens: Sequence[int]) -> int:
    """The token that follows `tokens` (at least one)."""
    return checksum_continuation(config, tokens, 1)[0]


def checksum_continuation(
    config: ChecksumConfig, prompt: Sequence[int], num_tokens: int
) -> list[int]:
    """The greedy continuation of `prompt`, past any end-of-sequence token."""
    keys = Keys.of(config)
    digests_LH, chain = _extend(keys, np.zeros((), np.uint64), np.uint64(0), prompt, 0)
    output: list[int] = []
    while True:
        output.append(_next_token(keys, digests_LH))
        if len(output) >= num_tokens:
            return output[:num_tokens]
        position = len(prompt) + len(output) - 1
        digests_LH, chain = _extend(keys, digests_LH, chain, output[-1:], position)


def checksum_logits(config: ChecksumConfig, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """The logits after `tokens`: all of them change when anything of the context does."""
    keys = Keys.of(config)
    digests_LH, _ = _extend(keys, np.zeros((), np.uint64), np.uint64(0), tokens, 0)
    losers_V = mix(keys.vocabulary_V ^ _digest(keys, digests_LH)) >> np.uint64(40)
    logits_V = losers_V.astype(np.float32) * LOSER_STEP
    logits_V[_next_token(keys, digests_LH)] = WINNER
    return logits_V


def _extend(
    keys: Keys, digests_LH: Words, chain: np.uint64, tokens: Sequence[int], start: int
) -> tuple[Words, np.uint64]:
    """Add `tokens`, the first of them at position `start`, to the digests and to the chain."""
    ids_T = np.asarray(tokens, np.uint64)
    positions_T = np.arange(start, start + len(ids_T), dtype=np.uint64)
    chain_T = np.cumsum(mix(mix(keys.salt + ids_T) + positions_T), dtype=np.uint64) + chain
    raw_TLPHD = chain_T[:, None, None, None, None] ^ keys.values_LPHD
    kv_TLPHD = mix(raw_TLPHD)
    kv_TLPHD[:, :, 0, :, 0] = raw_TLPHD[:, :, 0, :, 0]
    weights_TPD = keys.positions_CPD[start : start + len(ids_T)]
    return digests_LH + np.einsum("tlphd,tpd->lh", kv_TLPHD, weights_TPD), chain_T[-1]


def _digest(keys: Keys, digests_LH: Words) -> Words:
    """The digest of the whole context, of shape [1]."""
    return mix(mix(digests_LH ^ keys.digests_LH).sum(dtype=np.uint64, keepdims=True).reshape(1))


def _next_token(keys: Keys, digests_LH: Words) -> int:
    return int(_digest(keys, digests_LH)[0] >> np.uint64(1)) % len(keys.vocabulary_V)
