"""An engine in a process of its own, stopped but for the time in which it is asked something."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engines.files import default_file, fp32_gguf, hugging_face_folder, q8_0_gguf
from kvferry.die_with_parent import wrap

CHILD = Path(__file__).with_name("child.py")
PEERS = Path(".venv-peers")
LLAMA_FILES = {"dense": fp32_gguf, "int8": q8_0_gguf, "stored": default_file}
LLAMA_TYPES = {"dense": "F32", "int8": "Q8_0", "stored": "Q4_1"}


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine, and the form in which it is to keep the weights."""

    engine: str
    weights: str = "dense"

    def __str__(self) -> str:
        if self.engine == "llama.cpp":
            return f"llama.cpp {LLAMA_TYPES[self.weights]}"
        if self.engine == "kvferry":
            return f"kvferry {self.weights}"
        return self.engine


class Running:
    """From its start on; raises OSError where it is not installed or does not start."""

    def __init__(self, who: Contestant, threads: int) -> None:
        self.who = who
        self.name = str(who)
        began = time.perf_counter()
        python, model, environment = _environment(who, threads)
        more = [who.weights] if who.engine == "kvferry" else []
        self._process = subprocess.Popen(
            wrap((python, str(CHILD), who.engine, model, str(threads), *more), os.getpid()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | environment,
        )
        self._read()
        self.start_s = time.perf_counter() - began
        self.resident_bytes = self._memory("VmRSS")
        self._stop()

    def ask(self, **asked: Any) -> float:
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found = float(self._read())
        self._stop()
        return found

    def peak_bytes(self) -> int:
        return self._memory("VmHWM")

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()

    def _memory(self, field: str) -> int:
        return memory_of(self._process.pid, field)

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def _read(self) -> Any:
        """The next answer, past whatever else a library prints."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise OSError(f"{self.name} ended with exit code {self._process.wait()}")


def memory_of(pid: int, field: str) -> int:
    """Bytes, of a field of /proc's status such as VmRSS."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _environment(who: Contestant, threads: int) -> tuple[str, str, dict[str, str]]:
    """Python, model and variables of an engine. Raises OSError where it is not installed."""
    root = str(CHILD.parents[2])
    if who.engine in ("kvferry", "limits"):
        return sys.executable, "smollm2", {"PYTHONPATH": root}
    if who.engine == "transformers":
        return sys.executable, str(hugging_face_folder()), {"HF_HUB_OFFLINE": "1"}
    python = PEERS / who.engine.lower() / "bin" / "python"
    if not python.exists():
        raise OSError("not installed: make bench-engines-env")
    if who.engine == "llama.cpp":
        return str(python), str(LLAMA_FILES[who.weights]()), {}
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return str(python), str(hugging_face_folder()), variables
