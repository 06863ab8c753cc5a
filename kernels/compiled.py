"""C sources, compiled at first use by the compiler that `make` needs anyway.

The library is kept beside Python's own compiled files, or in a folder of this user's where those
may not be written, under a name that changes with the sources, the flags, the platform and, for
code that suits one processor only, the processor. Where it cannot be had, the log says once what
does the work instead, and why.
"""

import ctypes
import errno
import hashlib
import logging
import os
import re
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

FLAGS: tuple[str, ...] = ("-O3", "-shared", "-fPIC", "-std=c11", "-Wall", "-Werror")
NATIVE = "-march=native"
# An installation that is another user's, or lies on a read-only root, as in a pod.
NOT_FOR_US = (errno.EACCES, errno.EPERM, errno.EROFS)

Made = TypeVar("Made")

log = logging.getLogger(__name__)

Signatures = Mapping[str, tuple[object, Sequence[object]]]
"""By name, what a function returns and what it takes, as ctypes has it."""


class Unfit(Exception):
    """A library that was loaded and does not do what it should."""


def loaded(
    source: Path,
    *flags: str,
    signatures: Signatures,
    make: Callable[[ctypes.CDLL], Made],
    otherwise: str,
    beside: Sequence[Path] = (),
    needs_linux: bool = False,
    keeps_lock: bool = False,
) -> Made | None:
    """What `make` makes of the library of `source`; None, with `otherwise` in the log, without it.

    `make` raises OSError or Unfit for a library that will not do. With `keeps_lock` calls hold the
    interpreter lock: for functions so short that giving it back would cost more, and for data that
    has no lock of its own. Whoever calls this keeps what it returns, None too.
    """
    try:
        if sys.byteorder != "little":
            raise Unfit("the sources are for little-endian machines")
        if needs_linux and not sys.platform.startswith("linux"):
            raise Unfit(f"{source.name} needs Linux")
        open_library = ctypes.PyDLL if keeps_lock else ctypes.CDLL
        library = open_library(str(compiled(source, *flags, beside=beside)))
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        return make(library)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        log.warning("%s: %s", otherwise, said[0] if said else error)
    except (OSError, subprocess.SubprocessError, Unfit) as error:
        log.warning("%s: %s", otherwise, error)
    return None


def compiled(source: Path, *flags: str, beside: Sequence[Path] = ()) -> Path:
    """The shared library of `source`, the sources `beside` it, and the headers they include.

    Raises OSError and subprocess.SubprocessError.
    """
    sources = (source, *beside)
    text = b"".join(path.read_bytes() for path in _with_headers(sources))
    processor = _processor() if NATIVE in flags else ""
    about = repr((FLAGS, flags, sysconfig.get_platform(), processor)).encode()
    name = f"{source.stem}-{hashlib.blake2b(text + about, digest_size=8).hexdigest()}.so"
    try:
        return _kept(sources, flags, source.parent / "__pycache__", name)
    except OSError as error:
        if error.errno not in NOT_FOR_US:
            raise
        return _kept(sources, flags, _private_folder(), name)


def _kept(sources: Sequence[Path], flags: Sequence[str], folder: Path, name: str) -> Path:
    """The library of that name in the folder, compiled if it is not there."""
    target = folder / name
    if not target.exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            _compile(sources, Path(work) / name, flags).replace(target)  # at once: others may be
    return target


def _private_folder() -> Path:
    """Where libraries are kept whose sources lie where we may not write. Raises OSError."""
    folder = Path(tempfile.gettempdir()) / f"kvferry-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone: remove it, or set TMPDIR")
    return folder


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
