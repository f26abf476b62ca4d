"""Device operations that the model is built on, each specified by a plain XLA reference.

They know arrays only: no configuration, no mesh.
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
