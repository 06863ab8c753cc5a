"""Why a worker does not come up, in one sentence that says what to do."""


class CannotStart(Exception):
    """The settings, the machine or a peer does not allow this worker to run."""
