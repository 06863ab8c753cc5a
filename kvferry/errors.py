"""What a command says when it cannot go on.

CommandError          one sentence for the person at the terminal; exit status 1
├─ BadSettings        a file, an environment variable or a flag that makes no sense
├─ PartFailed         a part of the cluster did not start
└─ NoCluster          a client command found nothing to talk to
"""


class CommandError(Exception):
    """The message says what is wrong and what to do, in one sentence."""


class BadSettings(CommandError):
    pass


class PartFailed(CommandError):
    pass


class NoCluster(CommandError):
    pass
