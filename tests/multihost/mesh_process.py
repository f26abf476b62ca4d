"""One process of ``processes.on_mesh``: it joins the others, calls the function and writes what the function returns.

Usage: python -m tests.multihost.mesh_process CALL RESULT_FILE
"""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import jax


def main(call: dict, result: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", call["devices"])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(call["coordinator"], call["processes"], call["process"])
    module, name = call["function"]
    try:
        result.write_text(json.dumps(getattr(importlib.import_module(module), name)(**call["arguments"])))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly exit would wait for the others
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
