"""Generates gimbal_jax/serving/protos/control_pb2* from control.proto (needs the dev extra)."""

import os
import sys
from pathlib import Path

from grpc_tools import protoc

PROTO = "gimbal_jax/serving/protos/control.proto"


def main() -> int:
    os.chdir(Path(__file__).resolve().parents[1])
    return protoc.main(["protoc", "-I.", "--python_out=.", "--pyi_out=.", "--grpc_python_out=.", PROTO])


if __name__ == "__main__":
    sys.exit(main())
