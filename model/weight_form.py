"""The forms in which a worker may keep its weight matrices: see `model.packing`."""

from typing import Literal

# `dense`: in the dtype that the worker computes in.
WeightForm = Literal["dense", "bf16", "int8", "int4", "stored"]
