import pytest

from tests.transport.harness import WIRES, cluster, network


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (3, 2), (2, 9), (9, 1)])
async def test_every_cell_arrives_byte_exact(wire: str, prefill_tp: int, decode_tp: int) -> None:
    async with network(wire) as net, cluster(net, prefill_tp, decode_tp) as group:
        source, target = [5, 3, 9, 0, 11], [7, 20, 2, 15, 4]
        reports, receipts = await group.carry(18, source, target)
        group.check_blocks(18, source, target)
        assert sum(r.bytes for r in reports) == sum(r.bytes for r in receipts)
        assert [t.token_id for t in receipts[0].first_tokens] == [7]
