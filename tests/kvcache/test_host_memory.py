import torch

from kvcache import host_memory


def test_large_memory_is_as_torch_would_give_it() -> None:
    for shape in ((3, 5), (0, 7), (2, 1024, 1024)):
        memory = host_memory.empty(shape, torch.bfloat16)
        assert memory.shape == shape and memory.is_contiguous()
        memory.fill_(2.5)
        assert bool((memory == 2.5).all())
