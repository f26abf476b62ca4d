"""Programs compiled for GPUs that are not there; collected only where XLA's CUDA compiler is installed."""

import os
from importlib.util import find_spec

# Read when jax loads its plugins and when the first kernel is compiled.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

collect_ignore_glob = [] if find_spec("jax_cuda13_plugin") else ["test_*.py"]
