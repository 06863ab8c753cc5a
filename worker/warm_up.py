"""Run a prompt or two before anybody waits for one.

The first forward pass of a process pays for buffers, threads and kernels; were it measured, the
router would think this worker slow. So one prompt is run for nothing and a second one for the
figures that the worker announces.
"""

import asyncio

from engine.engine import Engine
from engine.request import Request, TokenOutput
from engine.sampling_params import SamplingParams
from worker.outputs import Outputs

MAX_PROMPT_TOKENS = 128
NUM_OUTPUT_TOKENS = 4


async def warm_up(engine: Engine, vocab_size: int, max_prompt_tokens: int) -> None:
    """Leave the engine warm, its speed measured and its cache empty. Raises worker Refused."""
    length = min(MAX_PROMPT_TOKENS, max_prompt_tokens)
    for first_token in range(2):
        engine.forget_speed()
        await _run(engine, [(first_token + i) % vocab_size for i in range(length)])
    engine.flush_cache()


async def _run(engine: Engine, prompt: list[int]) -> None:
    outputs = Outputs(asyncio.get_running_loop())
    key = engine.new_key()
    params = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    engine.add(Request(f"warm-up {key}", key, prompt, params, outputs.put))
    while True:
        output = await outputs.take()
        if isinstance(output, TokenOutput) and output.finish_reason:
            return
