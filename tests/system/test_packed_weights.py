"""The real model from its own quantised blocks, in two workers: the tokens of one process."""

from engine.sampling_params import SamplingParams
from kvcache.head_map import HeadMap
from model.comm import Comm
from model.model import Model
from model.source import open_model
from tests.model.paged_run import PagedRun
from tests.system.in_process import decode_worker, disaggregated, prefill_worker
from transport.loopback_wire import LoopbackWire

NUM_TOKENS = 10


async def test_two_workers_that_keep_weights_as_stored_give_the_tokens_of_one_process() -> None:
    source, wire = open_model("smollm2"), LoopbackWire()
    prompt = source.tokenizer().encode("The three largest cities of Italy are", add_bos=True)

    def load(head_map: HeadMap, comm: Comm) -> Model:
        return source.load(head_map, comm.rank, comm, weights="stored")

    expected = PagedRun(load, HeadMap.even(9, 3, 1)).greedy("alone", prompt, NUM_TOKENS)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    async with (
        prefill_worker(source, wire, weights="stored", num_blocks=64) as prefill,
        decode_worker(source, wire, weights="stored", num_blocks=64) as decode,
    ):
        answer = await disaggregated(prefill, decode, prompt, params)
        assert answer.tokens == [expected]
