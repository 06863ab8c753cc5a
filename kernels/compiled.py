"""C sources of this folder, compiled at first use by the compiler that `make` needs anyway.

The library is kept beside Python's own compiled files, under a name that changes with the sources,
the flags, the platform and, for code that suits one processor only, the processor.
"""

import hashlib
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-O3", "-shared", "-fPIC", "-std=c11", "-Wall", "-Werror")


NATIVE = "-march=native"


def compiled(source: Path, *flags: str, beside: Sequence[Path] = ()) -> Path:
    """The shared library of `source`, the sources `beside` it, and the headers they include.

    Raises OSError and subprocess.SubprocessError.
    """
    sources = (source, *beside)
    text = b"".join(path.read_bytes() for path in _with_headers(sources))
    processor = _processor() if NATIVE in flags else ""
    about = repr((FLAGS, flags, sysconfig.get_platform(), processor)).encode()
    name = f"{source.stem}-{hashlib.blake2b(text + about, digest_size=8).hexdigest()}.so"
    folder = source.parent / "__pycache__"
    target = folder / name
    if target.exists():
        return target
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = _compile(sources, Path(work) / name, flags)
            return made.replace(target)  # at once: others may be doing it
    except PermissionError:  # an installation that is not ours: compile for this process alone
        return _compile(sources, Path(tempfile.mkdtemp(prefix="kvferry-")) / name, flags)


def _with_headers(sources: Sequence[Path]) -> list[Path]:
    found: dict[Path, None] = {}
    left = list(sources)
    while left:
        path = left.pop()
        if path not in found:
            found[path] = None
            names = re.findall(r'^#include "(.+)"$', path.read_text(), re.MULTILINE)
            left += [path.with_name(name) for name in names]
    return sorted(found)


def _processor() -> str:
    """What tells processors with different instructions apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(sources: Sequence[Path], target: Path, flags: Sequence[str]) -> Path:
    command = ["cc", *FLAGS, "-o", str(target), *map(str, sources), *flags]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    os.chmod(target, 0o700)
    return target
