"""A prefill worker that damages what it sends: decode takes nothing from it, and others serve."""

from typing import Any

import grpc
import pytest

from engine.clock import MonotonicClock
from engine.sampling_params import SamplingParams
from model.checksum_reference import checksum_continuation
from model.config import ChecksumConfig
from model.source import open_model
from tests.system.in_process import calls_answered, decode_worker, disaggregated, prefill_worker
from transport.fault_wire import FaultWire
from transport.faults import Faults
from transport.loopback_wire import LoopbackWire
from worker.refusal import Refused

SOURCE = open_model("checksum")
PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


def prompt_of(number: int) -> list[int]:
    return [(number * 37 + i * i) % 256 for i in range(60)]


def right(prompt: list[int]) -> list[list[int]]:
    return [checksum_continuation(ChecksumConfig(), prompt, PARAMS.max_tokens)]


async def test_a_worker_that_damages_is_refused_and_requests_go_on_elsewhere() -> None:
    """Two decode workers: only the one that has seen the damage refuses."""
    wire = LoopbackWire()
    with Faults.of("seed=5 flip=0.4") as faults:
        faulty = FaultWire(wire, faults, MonotonicClock())
        watchful: dict[str, Any] = {
            "num_blocks": 256,
            "max_damage_share": 1e-4,
            "max_link_damages": 1,
        }
        async with (
            prefill_worker(SOURCE, faulty, tp=2, num_blocks=64) as bad,
            calls_answered(bad),
            prefill_worker(SOURCE, wire, num_blocks=64) as good,
            decode_worker(SOURCE, wire, **watchful) as decode,
            decode_worker(SOURCE, wire, **watchful) as other,
        ):
            number = 0
            while not decode.sides[0].counts.wires_quarantined:
                number += 1
                answer = await disaggregated(bad, decode, prompt_of(number), PARAMS)
                assert answer.tokens == right(prompt_of(number))
            assert number < 20

            with pytest.raises(Refused) as refused:
                await disaggregated(bad, decode, prompt_of(100), PARAMS)
            assert refused.value.code is grpc.StatusCode.UNAVAILABLE
            name = bad.identity.worker
            assert f"takes nothing from {name}: the wire loopback" in refused.value.reason
            assert "cells came damaged over loopback" in refused.value.reason

            served = await disaggregated(good, decode, prompt_of(101), PARAMS)
            assert served.tokens == right(prompt_of(101))
            faults.on = False  # what is wrong with its way to one need not be with that to another
            served = await disaggregated(bad, other, prompt_of(102), PARAMS)
            assert served.tokens == right(prompt_of(102))
            for worker in (bad, good, decode, other):
                await worker.settled()
