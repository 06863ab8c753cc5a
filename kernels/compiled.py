"""C sources of this folder, compiled at first use by the compiler that `make` needs anyway.

The library is kept beside Python's own compiled files, under a name that changes with the source,
the flags and the platform.
"""

import hashlib
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-O3", "-shared", "-fPIC", "-std=c11", "-Wall", "-Werror")


def compiled(source: Path, *flags: str) -> Path:
    """The shared library of `source` and of the header that bears its name, if one does.

    Raises OSError and subprocess.SubprocessError.
    """
    header = source.with_suffix(".h")
    text = source.read_bytes() + (header.read_bytes() if header.exists() else b"")
    about = repr((FLAGS, flags, sysconfig.get_platform())).encode()
    name = f"{source.stem}-{hashlib.blake2b(text + about, digest_size=8).hexdigest()}.so"
    folder = source.parent / "__pycache__"
    target = folder / name
    if target.exists():
        return target
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = _compile(source, Path(work) / name, flags)
            return made.replace(target)  # at once: others may be doing it
    except PermissionError:  # an installation that is not ours: compile for this process alone
        return _compile(source, Path(tempfile.mkdtemp(prefix="kvferry-")) / name, flags)


def _compile(source: Path, target: Path, flags: Sequence[str]) -> Path:
    command = ["cc", *FLAGS, "-o", str(target), str(source), *flags]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    os.chmod(target, 0o700)
    return target
