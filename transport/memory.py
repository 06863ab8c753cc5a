"""How the last few thousand transfers ended, so that a late frame is known for what it is."""

from collections import OrderedDict

from transport.orders import ShipmentKey, TransferFailed


class Memory:
    def __init__(self, max_remembered: int) -> None:
        self._max_remembered = max_remembered
        self._ends: OrderedDict[ShipmentKey, TransferFailed | None] = OrderedDict()

    def __contains__(self, key: ShipmentKey) -> bool:
        return key in self._ends

    def remember(self, key: ShipmentKey, failure: TransferFailed | None) -> None:
        """The first end stands: a late success does not undo a failure."""
        self._ends.setdefault(key, failure)
        while len(self._ends) > self._max_remembered:
            self._ends.popitem(last=False)

    def failure(self, key: ShipmentKey) -> TransferFailed | None:
        """Why the transfer failed; None when it was committed."""
        return self._ends[key]
