"""``route_and_count`` compiled for H100."""

from functools import partial

import jax.numpy as jnp
import pytest

from gimbal_jax.pallas_kernels import route_and_count
from gimbal_jax.pallas_kernels.route_and_count_mosaic import BLOCK, TILE
from tests.cuda.harness import compile_for_h100, shape
from tests.pallas_kernels.shapes import ROUTING, RoutingShape


def temporaries_bound(sizes: RoutingShape) -> int:
    """Return the bytes of the kernel's results in whole blocks and tiles, and of the logits if they must be padded.

    The bound adds a KiB, and two numbers per token and per expert.
    """
    blocks, columns, rank_columns = -(-sizes.tokens // BLOCK), up(sizes.experts, TILE), up(sizes.ranks, TILE)
    results = blocks * BLOCK * (3 * sizes.k + rank_columns) + blocks * (columns + rank_columns)
    rows = up(sizes.tokens, 8)
    copy = rows * columns if (rows, columns) != (sizes.tokens, sizes.experts) else 0
    return 4 * (results + copy + 2 * (blocks * BLOCK + columns)) + 1024


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("name", sorted(ROUTING))
def test_is_one_kernel_without_spills_or_large_temporaries(name, renormalise):
    sizes = ROUTING[name]
    compiled = compile_for_h100(
        partial(route_and_count, k=sizes.k, renormalise=renormalise, ranks=sizes.ranks, backend="mosaic"),
        shape(jnp.float32, sizes.tokens, sizes.experts),
        shape(jnp.bool_, sizes.tokens),
        shape(jnp.int32, sizes.experts),
    )
    (kernel,) = compiled.kernels
    assert kernel.name == "route_and_count"
    assert (kernel.spill_store_bytes, kernel.spill_load_bytes, kernel.stack_bytes) == (0, 0, 0)
    assert compiled.temporary_bytes <= temporaries_bound(sizes)
