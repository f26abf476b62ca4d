"""Programs compiled for GPUs without a GPU; collected only if XLA's CUDA compiler is installed."""

import os
from importlib.util import find_spec

import pytest

# jax reads these when it loads its plugins and when it compiles the first kernel.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

collect_ignore_glob = [] if find_spec("jax_cuda13_plugin") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def kernels_are_known():
    """Keep the compiler's report on each kernel, because it reports a kernel only once in a process."""
    import jax

    from gimbal_jax.planning.kernels import compile_and_tell
    from tests.cuda.harness import KNOWN

    real = jax.stages.Lowered.compile

    def compile_watched(lowered, *arguments, **settings):
        return compile_and_tell(lowered, lambda: real(lowered, *arguments, **settings), KNOWN).program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile_watched)
        yield
