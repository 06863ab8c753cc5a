"""The committed gRPC stubs are what the .proto files generate today (`make proto`)."""

from importlib.resources import files
from pathlib import Path

import pytest
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
STUBS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def test_the_stubs_are_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    protos = sorted(str(path) for path in Path("protos").glob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    well_known = files("grpc_tools") / "_proto"
    assert protoc.main(["protoc", "-I.", f"-I{well_known}", *outputs, *protos]) == 0

    generated = {path.name: path.read_text() for path in (tmp_path / "protos").iterdir()}
    committed = {
        path.name: path.read_text()
        for path in (ROOT / "protos").iterdir()
        if path.name.endswith(STUBS)
    }
    assert sorted(generated) == sorted(committed)
    stale = [name for name in generated if generated[name] != committed[name]]
    assert not stale, f"run `make proto`: {stale}"
