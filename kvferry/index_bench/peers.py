"""Other projects' routers, in an environment of their own that `make bench-routers-env` makes."""

import json
import subprocess
from pathlib import Path
from typing import Any

ENVIRONMENT = Path(".venv-peers/routers")
DYNAMO = Path(__file__).with_name("dynamo.py")
LONGEST_S = 120.0


def peer_program(name: str) -> Path | None:
    """A program of that environment; None where it is not installed."""
    found = ENVIRONMENT.absolute() / "bin" / name
    return found if found.exists() else None


def dynamo(*arguments: str) -> tuple[dict[str, Any], str]:
    """What `dynamo.py` found, or nothing and why."""
    python = peer_program("python")
    if python is None:
        return {}, "Dynamo's index is left out: `make bench-routers-env` installs it"
    command = (str(python), "-I", str(DYNAMO), *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    if done.returncode:
        return {}, f"Dynamo's index was not measured: {done.stderr.strip().splitlines()[-1]}"
    return json.loads(done.stdout), ""
