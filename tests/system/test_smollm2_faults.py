"""The real model over a wire that damages cells: the very tokens of a wire that does not."""

from pathlib import Path

import grpc

from engine.clock import MonotonicClock
from engine.sampling_params import SamplingParams
from model.source import open_model
from tests.system.in_process import decode_worker, disaggregated, prefill_worker
from transport.fault_wire import FaultWire
from transport.faults import DAMAGES, Faults
from transport.loopback_wire import LoopbackWire
from worker.refusal import Refused

MOST_PROMPTS = 20  # seven or eight will do, mostly
CHUNK_TOKENS = 16  # of prefill
DOZENS = 20  # faults of each kind, at least


async def test_damaged_cells_of_the_real_model_change_no_token() -> None:
    source, wire = open_model("smollm2"), LoopbackWire()
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = source.tokenizer().encode(text)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with Faults.of("seed=2", *(f"{kind}=0.01" for kind in DAMAGES)) as faults:
        faulty = FaultWire(wire, faults, MonotonicClock())
        async with (
            prefill_worker(source, faulty, num_blocks=128) as prefill,
            decode_worker(source, wire, tp=3, num_blocks=128) as decode,
            decode_worker(source, wire, tp=3, num_blocks=128) as spared,
        ):
            given_up = 0
            for number in range(MOST_PROMPTS):
                if all(faults.count(kind) >= DOZENS for kind in DAMAGES):
                    break
                start = 31 * (number % 8)
                prompt = [number, *ids[start : start + 90]]  # none is cached
                faults.on = True
                try:
                    answer = await disaggregated(prefill, decode, prompt, params, CHUNK_TOKENS)
                except Refused as refused:  # one cell, damaged whenever it was asked for
                    assert refused.code is grpc.StatusCode.DATA_LOSS
                    given_up += 1
                    continue
                faults.on = False
                right = await disaggregated(prefill, spared, prompt, params, CHUNK_TOKENS)
                assert answer.tokens == right.tokens
            assert given_up <= 2
            caught = sum(side.counts.damaged_chunks for side in decode.sides)
            assert given_up or caught == faults.count()
            for kind in DAMAGES:
                assert faults.count(kind) >= DOZENS
            for worker in (prefill, decode, spared):
                await worker.settled()
