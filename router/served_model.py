"""What the router knows of the model: its words and its limits, never its weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache.block_hash import Namespace
from model.chat_template import ChatTemplate
from model.detokenizer import Detokenizer
from model.source import ModelSource
from model.tokenizer import Tokenizer
from prefix_index.index import Manifest


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    namespace: Callable[[str, str], Namespace]  # of a dtype and a form of weights

    @classmethod
    def of(cls, source: ModelSource, name: str = "") -> "ServedModel":
        """Reads the whole file once, for its fingerprint."""
        source.weights_fingerprint()
        return cls(
            name=name or source.name,
            max_context=source.max_context,
            vocab_size=source.vocab_size,
            eos_token_ids=tuple(source.eos_token_ids),
            tokenizer=source.tokenizer(),
            chat_template=source.chat_template(),
            namespace=source.namespace,
        )

    def encode_text(self, text: str) -> list[int]:
        """Raises ValueError for text that is not Unicode."""
        return self.tokenizer.encode(text, add_bos=True)

    def encode_chat(
        self, messages: Sequence[dict[str, str]], add_generation_prompt: bool
    ) -> list[int]:
        """Raises ValueError for messages the template does not take."""
        return self.chat_template.render_ids(
            messages, self.tokenizer, add_generation_prompt=add_generation_prompt
        )

    def detokenizer(self, chat: bool) -> Detokenizer:
        """For one choice. A completion goes on from its prompt; an answer in a chat begins anew."""
        return Detokenizer(self.tokenizer, continues=not chat)

    def unfit(self, manifest: Manifest) -> str:
        """Why a worker with this manifest cannot serve this model; empty when it can."""
        if manifest.vocab_size != self.vocab_size:
            return (
                f"serves another model: its vocabulary has {manifest.vocab_size} tokens,"
                f" {self.name}'s has {self.vocab_size}"
            )
        ours = self.namespace(manifest.dtype, manifest.weights).hex()
        if manifest.namespace != ours:
            return (
                f"serves another model: its namespace is {manifest.namespace[:16]},"
                f" {self.name}'s is {ours[:16]}"
            )
        return ""
