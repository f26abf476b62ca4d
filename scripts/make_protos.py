"""Generates gimbal_jax/protos/*_pb2* from the .proto files there (needs the dev extra)."""

import os
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

FOLDER = Path("gimbal_jax/protos")
# The published messages are generated already; without this protoc would look for them beside ours.
IMPORTS = {"import vllm_engine_pb2 as": "from smg_grpc_proto.generated import vllm_engine_pb2 as"}


def main() -> int:
    os.chdir(Path(__file__).resolve().parents[1])
    protos = sorted(str(path) for path in FOLDER.glob("*.proto"))
    published = files("smg_grpc_proto") / "proto"
    outputs = ["--python_out=.", "--pyi_out=.", "--grpc_python_out=."]
    status = protoc.main(["protoc", "-I.", f"-I{published}", *outputs, *protos])
    for path in FOLDER.glob("*_pb2*.py*"):
        text = path.read_text("utf-8")
        for wrong, right in IMPORTS.items():
            text = text.replace(wrong, right)
        path.write_text(text, "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
