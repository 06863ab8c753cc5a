"""The floor plan: a folder may import only what its line names, and the light ones stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CELLAR = {"kernels", "protos"}
CACHE = CELLAR | {"kvcache"}
MODEL = CACHE | {"model"}
SERVING = MODEL | {"engine", "transport", "prefix_index"}
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "protos": set(),
    "kvcache": CELLAR,
    "model": CACHE,
    "engine": MODEL,
    "transport": MODEL,
    "prefix_index": MODEL,
    "worker": SERVING,
    "prefill_worker": SERVING | {"worker"},
    "decode_worker": SERVING | {"worker"},
    "router": SERVING,
    "kvferry": SERVING | {"worker", "prefill_worker", "decode_worker", "router"},
}

# Loaded by the router, by the commands that only talk to a cluster, or by both: never with torch.
LIGHT = [
    "engine.clock",
    "engine.sampling_params",
    "kvcache.block_hash",
    "kvcache.block_pool",
    "kvcache.capacity",
    "kvcache.head_map",
    "kvcache.spec",
    "kvferry.__main__",
    "kvferry.settings",
    "model.chat_template",
    "model.config",
    "model.detokenizer",
    "model.source",
    "model.stop_strings",
    "model.tokenizer",
    "prefix_index.announcer",
    "prefix_index.index",
    "prefix_index.memory_index",
    "prefix_index.mirror",
    "prefix_index.redis_index",
    "router.main",
    "transport.grpc_options",
]


def imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports here are absolute"
            names.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
    return names


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_downwards(folder: str) -> None:
    paths = list((ROOT / folder).rglob("*.py"))
    assert paths, f"{folder}/ is part of the floor plan but holds no module"
    for path in paths:
        for name in imported_names(path) & MAY_IMPORT.keys():
            assert name in MAY_IMPORT[folder] | {folder}, f"{path}: imports {name}"


def test_every_folder_of_modules_has_a_line_in_the_floor_plan() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(MAY_IMPORT)


def test_a_folder_says_in_one_sentence_why_it_exists_and_nothing_else() -> None:
    for folder in MAY_IMPORT:
        tree = ast.parse((ROOT / folder / "__init__.py").read_text())
        docstring = ast.get_docstring(tree)
        assert docstring is not None, folder
        assert docstring.endswith("."), folder
        assert len(tree.body) == 1, f"{folder}/__init__.py holds more than its sentence"


def test_every_module_starts_with_a_sentence() -> None:
    for folder in MAY_IMPORT:
        for path in (ROOT / folder).rglob("*.py"):
            if "_pb2" not in path.name:
                assert ast.get_docstring(ast.parse(path.read_text())), f"{path} says nothing"


def test_the_router_and_the_client_commands_load_no_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {LIGHT!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' loads torch'\n"
        "    assert 'ray' not in sys.modules, name + ' loads ray'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_unpickles_or_evaluates_what_crossed_a_process_boundary() -> None:
    forbidden_imports = {"pickle", "dill", "marshal", "shelve", "cloudpickle"}
    forbidden_calls = {"eval", "exec"}
    for folder in MAY_IMPORT:
        for path in (ROOT / folder).rglob("*.py"):
            assert not imported_names(path) & forbidden_imports, path
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    assert called not in forbidden_calls, f"{path}:{node.lineno}: {called}"
                    assert called != "torch.load", f"{path}:{node.lineno}: {called}"
                    assert not called.endswith(("_object_list", "_object")), (
                        f"{path}:{node.lineno}: {called}"
                    )
