"""Turn the router's work request into the engine's, naming its blocks on the way."""

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from engine.request import OnOutput, Request
from engine.sampling_params import InvalidParam, SamplingParams
from kvcache.block_hash import PUBLIC, Namespace, TenantKey, name_blocks
from protos import worker_pb2
from worker.refusal import Refused


@dataclass(frozen=True, slots=True)
class WorkIntake:
    """Makes engine requests. `next_key` gives numbers never given before in the engine's life."""

    namespace: Namespace
    block_size: int
    next_key: Callable[[], int]

    def accept(
        self,
        work: worker_pb2.WorkRequest,
        on_output: OnOutput,
        *,
        hold: bool = False,
        max_chunk_tokens: int = 0,
    ) -> Request:
        """Raises Refused: the router has checked all this, so what is wrong is a peer."""
        if not work.prompt:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "prompt has 0 tokens, needs 1")
        try:
            params = SamplingParams.from_proto(work.sampling)
        except InvalidParam as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        tenant = TenantKey(work.tenant_key) if work.tenant_key else PUBLIC
        prompt = tuple(work.prompt)
        return Request(
            request_id=work.request_id,
            request_key=self.next_key(),
            prompt=prompt,
            params=params,
            on_output=on_output,
            tenant=tenant,
            eos_token_ids=tuple(work.eos_token_ids),
            names=name_blocks(
                self.namespace, tenant, prompt, self.block_size, work.num_public_tokens
            ),
            hold=hold,
            max_chunk_tokens=max_chunk_tokens,
        )
