"""How a prefill rank says where its cells lie, for a decode rank of its host to read them there."""

from kvcache.head_map import HeadInterval
from kvcache.mapped_pool import LayerPlace, PoolMap
from protos import transfer_pb2


def map_to_proto(pool: PoolMap) -> transfer_pb2.PoolMap:
    layers = [
        transfer_pb2.LayerPlace(
            offset=place.offset,
            block_stride=place.block_stride,
            plane_stride=place.plane_stride,
            head_stride=place.head_stride,
            slot_stride=place.slot_stride,
        )
        for place in pool.layers
    ]
    return transfer_pb2.PoolMap(
        num_bytes=pool.num_bytes,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        first_head=pool.kv_heads.start,
        num_heads=len(pool.kv_heads),
        layers=layers,
    )


def map_from_proto(told: transfer_pb2.PoolMap) -> PoolMap:
    """As it was told: `PoolMap.check` says whether it can be."""
    places = (
        LayerPlace(
            each.offset, each.block_stride, each.plane_stride, each.head_stride, each.slot_stride
        )
        for each in told.layers
    )
    heads = HeadInterval(told.first_head, told.first_head + told.num_heads)
    return PoolMap(told.num_bytes, told.num_blocks, told.block_size, heads, tuple(places))
