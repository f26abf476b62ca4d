"""Device operations of the model. Each has a specification in plain XLA, and most have a kernel for NVIDIA Hopper.

They take arrays only, and depend on no configuration and no mesh.

- ``backend``: the forms of an operation (XLA, kernel, interpreted kernel) and the fastest one of a device.
- ``route_and_count``: expert routing with counts by expert; ``route_and_count_mosaic`` is its kernel.
- ``grouped_matmul``: feed-forward of many experts over few tokens each.
- ``paged_attention``: attention over paged keys and values; ``paged_attention_mosaic`` is its kernel.
- ``product``: exact products of float32 activations with bfloat16 weights.
"""

from gimbal_jax.pallas_kernels.backend import Backend, backend_of
from gimbal_jax.pallas_kernels.grouped_matmul import grouped_ffn, grouped_ffn_reference
from gimbal_jax.pallas_kernels.paged_attention import paged_attention
from gimbal_jax.pallas_kernels.product import product
from gimbal_jax.pallas_kernels.route_and_count import Routing, route_and_count

__all__ = [
    "Backend",
    "Routing",
    "backend_of",
    "grouped_ffn",
    "grouped_ffn_reference",
    "paged_attention",
    "product",
    "route_and_count",
]
