"""What a request goes through before it is queued: its tokens, its length, its blocks' names."""

from collections.abc import Sequence

from engine.request import Refused, Request
from engine.stop_rules import StopRules
from kvcache.block_hash import BlockHash, Namespace, hash_block, name_blocks
from model.tokenizer import Tokenizer


class Preparing:
    """Of one engine. Belongs to no thread: it changes nothing but the request."""

    def __init__(
        self,
        namespace: Namespace,
        block_size: int,
        vocab_size: int | None,
        max_context: int | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        """None: whoever sends requests has checked it. `tokenizer` is needed for stop strings."""
        self._namespace = namespace
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._tokenizer = tokenizer

    def prepare(self, request: Request) -> None:
        """Check and complete a request. Raises Refused."""
        if not request.prompt:
            raise Refused(f"request {request.request_id} has an empty prompt")
        self.check_vocabulary(request.prompt)
        num_tokens = len(request.prompt) + request.params.max_tokens
        if self._max_context is not None and num_tokens > self._max_context:
            raise Refused(
                f"request {request.request_id} has {len(request.prompt)} prompt tokens and"
                f" max_tokens {request.params.max_tokens}, the context holds {self._max_context}"
            )
        if request.params.stop and self._tokenizer is None:
            raise Refused("stop strings need a tokenizer, and this engine has none")
        if not request.names:
            request.names = name_blocks(
                self._namespace, request.tenant, request.prompt, self._block_size
            )

    def check_vocabulary(self, token_ids: Sequence[int]) -> None:
        """Raises Refused."""
        size = self._vocab_size
        if size is None or not token_ids:
            return
        if not 0 <= min(token_ids) <= max(token_ids) < size:
            raise Refused(f"a token id is outside the vocabulary of {size}")

    def stop_rules(self, request: Request) -> StopRules:
        return StopRules(request.params, request.eos_token_ids, self._tokenizer)

    def name_block(
        self, request: Request, parent: BlockHash | None, token_ids: tuple[int, ...]
    ) -> BlockHash:
        """Of a block that the request has filled."""
        return hash_block(self._namespace, request.tenant, parent, token_ids)
