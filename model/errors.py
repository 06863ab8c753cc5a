"""What can be wrong with a model that somebody else made."""


class BadModelFile(Exception):
    """The file or folder cannot be served; the message is one sentence that says why."""
