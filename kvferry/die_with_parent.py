"""Run a command that ends when the process that started it ends, however that ends.

`python -m kvferry.die_with_parent PARENT_PID COMMAND...` becomes COMMAND. On Linux the kernel
then kills it once its parent is gone; elsewhere it is simply run.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def wrap(command: Sequence[str], parent_pid: int) -> list[str]:
    """The command line that runs `command` for as long as `parent_pid` lives.

    With -P, here and wherever we start a Python: a folder `model` where somebody happens to stand
    is none of ours.
    """
    return [sys.executable, "-P", "-m", "kvferry.die_with_parent", str(parent_pid), *command]


def main(arguments: Sequence[str]) -> None:
    parent_pid, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent_pid):
            sys.exit("the parent has ended already")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
