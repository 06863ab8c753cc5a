"""What happens when the index cannot tell two prompts apart."""

import random

import pytest

from engine.clock import MonotonicClock
from engine.engine import Engine, EngineConfig
from engine.request import Output, Request, TokenOutput
from engine.sampling_params import SamplingParams
from kvcache import block_hash
from kvcache.block_hash import PUBLIC, index_key, name_blocks
from kvcache.block_pool import BlockPool, Stored
from kvcache.head_map import HeadMap
from kvcache.kv_store import KvStore
from model.checksum_reference import checksum_next_token
from model.comm import SingleComm
from model.config import ChecksumConfig
from model.source import open_model
from prefix_index.events import index_events


def test_2000_prompts_whose_index_keys_collide_all_get_their_own_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With keys of one byte the index names any block for any prompt; the owner knows better."""
    monkeypatch.setattr(block_hash, "INDEX_KEY_BYTES", 1)
    source = open_model("checksum")
    assert isinstance(source.config, ChecksumConfig)
    comm, spec = SingleComm(), source.cache_spec(16)
    heads = HeadMap.even(9, 3, 1)
    store, space = KvStore(spec, heads.kv[0], 64), source.namespace()
    model = source.load(heads, 0, comm)
    engine = Engine(EngineConfig(), model, store, BlockPool(64), comm, space, MonotonicClock())
    rng, keys, seen = random.Random(8), set[bytes](), 0
    for number in range(2000):
        prompt = [rng.randrange(256) for _ in range(17)]
        outputs: list[Output] = []
        (name,) = name_blocks(space, PUBLIC, prompt, 16)
        seen += index_key(name) in keys
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = Request(str(number), engine.new_key(), prompt, params, outputs.append)
        engine.add(request)
        while engine.step():
            pass
        (token,) = (output for output in outputs if isinstance(output, TokenOutput))
        assert token.token_id == checksum_next_token(source.config, prompt)
        assert request.num_cached_tokens == 0
        for event in index_events(engine.drain_events()):
            if isinstance(event, Stored):
                keys.add(event.name)
    assert len(keys) == 256
    assert seen > 1500  # the index promised these a block that was another prompt's
