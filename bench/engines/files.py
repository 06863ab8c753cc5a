"""SmolLM2 as each engine wants to read it, all with the same values in fp32.

Made of the GGUF file that is the default model, once, in a folder of bench/out.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from model.source import open_model

FOLDER = Path("bench/out/models")


def default_file() -> Path:
    path = open_model("smollm2").path
    assert path is not None
    return path


def hugging_face_folder() -> Path:
    """fp32 safetensors and a config.json, by transformers' own reading of the file."""
    folder = FOLDER / "smollm2-hf"
    if not (folder / "model.safetensors").exists():
        import torch
        from transformers import AutoModelForCausalLM

        path = default_file()
        read = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        )
        del read.config.quantization_config  # what was read is dequantised
        model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        model.save_pretrained(folder)
    return folder


def fp32_gguf() -> Path:
    """The same fields, the tensors blown up."""
    return _gguf("smollm2-f32.gguf", gguf.GGMLQuantizationType.F32)


def q8_0_gguf() -> Path:
    """The same fields, every matrix in Q8_0."""
    return _gguf("smollm2-q8_0.gguf", gguf.GGMLQuantizationType.Q8_0)


def _gguf(name: str, matrices: gguf.GGMLQuantizationType) -> Path:
    target = FOLDER / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(default_file())
    unfinished = target.with_suffix(".part")
    writer: Any = gguf.GGUFWriter(unfinished, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if matrices.name == "F32" else "MOSTLY_Q8_0"])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stored = matrices if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.replace(target)
