"""Programs compiled for GPUs that are not there; collected only where XLA's CUDA compiler is installed."""

import os
from importlib.util import find_spec

import pytest

# Read when jax loads its plugins and when the first kernel is compiled.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

collect_ignore_glob = [] if find_spec("jax_cuda13_plugin") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def kernels_are_known():
    """The compiler tells of a kernel once in a process, so whatever a test compiles, what it tells is kept."""
    import jax

    from gimbal_jax.planning.kernels import compile_and_tell
    from tests.cuda.harness import KNOWN

    real = jax.stages.Lowered.compile

    def compile_watched(lowered, *arguments, **settings):
        return compile_and_tell(lowered, lambda: real(lowered, *arguments, **settings), KNOWN).program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile_watched)
        yield
