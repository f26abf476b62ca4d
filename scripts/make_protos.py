"""Generate gimbal_jax/protos/*_pb2* from the .proto files there. Needs the dev extra."""

import os
import sys
from pathlib import Path

from grpc_tools import protoc

FOLDER = Path("gimbal_jax/protos")


def main() -> int:
    os.chdir(Path(__file__).resolve().parents[1])
    protos = sorted(str(path) for path in FOLDER.glob("*.proto"))
    outputs = ["--python_out=.", "--pyi_out=.", "--grpc_python_out=."]
    return int(protoc.main(["protoc", "-I.", *outputs, *protos]))


if __name__ == "__main__":
    sys.exit(main())
