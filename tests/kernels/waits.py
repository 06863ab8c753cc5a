"""What a step may not do on a device: each of these waits for it, for a value or for a shape."""

import torch

aten = torch.ops.aten
WAITING = {
    aten.item,
    aten._local_scalar_dense,
    aten.nonzero,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
}
