"""How the last few thousand transfers ended, so that a late frame is known for what it is."""

from collections import OrderedDict
from dataclasses import dataclass

from transport.orders import Code, ShipmentKey, TransferFailed


@dataclass(frozen=True, slots=True)
class _End:
    """No exception: one that was raised holds on to all that its frames held."""

    code: Code | None  # of a failure
    reason: str
    num_whole_blocks: int


class Memory:
    def __init__(self, max_remembered: int) -> None:
        self._max_remembered = max_remembered
        self._ends: OrderedDict[ShipmentKey, _End] = OrderedDict()

    def __contains__(self, key: ShipmentKey) -> bool:
        return key in self._ends

    def remember(
        self, key: ShipmentKey, failure: TransferFailed | None, num_whole_blocks: int = 0
    ) -> None:
        """The first end stands: a late success does not undo a failure."""
        code, reason = (failure.code, failure.reason) if failure is not None else (None, "")
        self._ends.setdefault(key, _End(code, reason, num_whole_blocks))
        while len(self._ends) > self._max_remembered:
            self._ends.popitem(last=False)

    def failure(self, key: ShipmentKey) -> TransferFailed | None:
        """Why the transfer failed; None when it was committed."""
        end = self._ends[key]
        return TransferFailed(end.code, end.reason) if end.code is not None else None

    def num_whole_blocks(self, key: ShipmentKey) -> int:
        """How many blocks from the first on it left whole; none of what is not remembered."""
        end = self._ends.get(key)
        return end.num_whole_blocks if end else 0
