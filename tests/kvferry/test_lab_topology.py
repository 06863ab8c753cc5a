import pytest

from kvferry.errors import BadSettings
from kvferry.lab.topology import Shape, parse_shape, parse_topology


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("200mbit,5ms", Shape(200e6, 0.005)),
        ("1gbit", Shape(1e9)),
        ("unlimited, 200us", Shape(None, 0.0002)),
        ("1.5mbit,1s,0.5%", Shape(1.5e6, 1.0, 0.005)),
    ],
)
def test_a_link_is_a_rate_a_delay_and_a_loss(text: str, shape: Shape) -> None:
    assert parse_shape(text) == shape


def test_a_shape_reads_like_its_flag() -> None:
    assert str(parse_shape("200mbit,5ms")) == "200mbit, 5 ms"
    assert str(parse_shape("unlimited,200us,0.5%")) == "unlimited, 0.2 ms, 0.5% lost"


def test_every_pair_has_the_link_of_all_unless_it_has_its_own() -> None:
    topology = parse_topology(
        "prefill-0,decode,router", ["1gbit,1ms", "decode-prefill-0=200mbit,20ms"]
    )
    assert topology.nodes == ("prefill-0", "decode", "router")
    assert topology.shape("prefill-0", "decode") == Shape(200e6, 0.02)
    assert topology.shape("decode", "prefill-0") == Shape(200e6, 0.02)
    assert topology.shape("router", "decode") == Shape(1e9, 0.001)
    assert len(list(topology.pairs)) == 3
    assert len(list(topology.directions)) == 6


def test_nodes_that_are_only_counted_are_called_by_letters() -> None:
    assert parse_topology("3").nodes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("nodes", "links", "sentence"),
    [
        ("1", [], "2 to 16 nodes: 1 are asked for"),
        ("17", [], "2 to 16 nodes: 17 are asked for"),
        ("a,a", [], "same name"),
        ("a,B", [], "'B' cannot name a node"),
        ("a,thirteen-char", [], "'thirteen-char' cannot name a node"),
        ("2", ["fast"], "'fast' is no rate"),
        ("2", ["0mbit"], "'0mbit' is no rate"),
        ("2", ["1gbit,5"], "'5' is no delay"),
        ("2", ["1gbit,1ms,0.5"], "'0.5' is no loss"),
        ("2", ["1gbit,1ms,1%,x"], "RATE,DELAY,LOSS"),
        ("2", ["a-c=1gbit"], "'a-c' is no link between two of the nodes a, b"),
        ("2", ["a-a=1gbit"], "'a-a' is no link"),
        ("a,a-b,b,b-b", ["a-b-b=1gbit"], "'a-b-b' is no link"),  # it could be two
    ],
)
def test_what_makes_no_sense_is_refused(nodes: str, links: list[str], sentence: str) -> None:
    with pytest.raises(BadSettings, match=sentence):
        parse_topology(nodes, links)
