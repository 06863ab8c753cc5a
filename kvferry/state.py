"""The word that a running cluster leaves for the other commands of its user.

<state_dir>/           mode 0700
  lock                 held by `up` for as long as it lives
  cluster.json         where the doors and Redis are, mode 0600 (it has keys and passwords)
  parts/NAME.json      the settings of one process, mode 0600
  logs/NAME.log        what it printed
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from kvferry.errors import CommandError, NoCluster


class ClusterRecord(BaseModel):
    model_config = ConfigDict(frozen=True)

    pid: int
    model: str
    launcher: str
    grpc_address: str
    http_url: str
    redis_url: str
    key_prefix: str
    api_key: str = ""  # one that the doors accept; empty when they ask for none


def open_state_dir(path: Path) -> None:
    """Make the directory, private to this user. Raises CommandError when it is somebody else's."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid
        if owner != os.getuid():
            raise CommandError(f"{path} belongs to user {owner}: choose another with --state-dir")
        path.chmod(0o700)
        for folder in ("parts", "logs"):
            (path / folder).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"cannot use {path} ({error}): choose another with --state-dir"
        ) from None


@contextmanager
def only_cluster(path: Path) -> Iterator[None]:
    """Hold the state directory. Raises CommandError when a cluster already lives there."""
    open_state_dir(path)
    with (path / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                f"a cluster is already running from {path}: stop it, or give this one its own "
                "--state-dir and ports"
            ) from None
        try:
            yield
        finally:
            (path / "cluster.json").unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read; readers see the old one or the new one."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    fresh.replace(path)


def write_record(path: Path, record: ClusterRecord) -> None:
    write_private(path / "cluster.json", record.model_dump_json(indent=2) + "\n")


def read_record(path: Path, flag: str = "--grpc HOST:PORT") -> ClusterRecord:
    """The running cluster. Raises NoCluster when none lives there; `flag` says where one is."""
    advice = f"start one with `kvferry up`, or say where one is with {flag}"
    try:
        with (path / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        raise NoCluster(f"no cluster is running: {advice}")
    except BlockingIOError:
        pass
    except OSError:
        raise NoCluster(f"no cluster is running: {advice}") from None
    try:
        return ClusterRecord.model_validate_json((path / "cluster.json").read_text())
    except FileNotFoundError:
        raise NoCluster("the cluster is still starting: try again in a moment") from None
    except (OSError, ValidationError) as error:
        raise NoCluster(f"cannot read {path}/cluster.json ({error}): {advice}") from None
