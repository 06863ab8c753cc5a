"""How one life of a simulated worker ends."""


class LifeOver(Exception):
    """`worker`, by name, died before it was done; `streaming` when tokens had been handed out."""

    def __init__(self, worker: str, *, streaming: bool = False) -> None:
        self.worker = worker
        self.streaming = streaming
        super().__init__(f"{worker} died")
