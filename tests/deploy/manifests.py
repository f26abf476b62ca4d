"""The manifests of deploy/, read once, and the validator of Kubernetes' own schemas."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES, GROUP_FOLDER = DEPLOY / "kubernetes", DEPLOY / "leaderworkerset"
NOT_IN_SCHEMAS = ["kustomization.yaml", "servicemonitor.yaml"]
"""Of other projects, so that the schemas of Kubernetes do not know them."""
MANIFESTS = sorted(path.name for path in KUBERNETES.glob("*.yaml") if path.name not in NOT_IN_SCHEMAS)
VERSIONS = ("1.34", "1.37")


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def of_kind(kind: str) -> dict[str, Any]:
    """Return the only manifest of this kind for one node."""
    (found,) = [one for name in [*MANIFESTS, *NOT_IN_SCHEMAS] for one in documents(name) if one["kind"] == kind]
    return found


POD = of_kind("Deployment")["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
GROUP = read(GROUP_FOLDER / "leaderworkerset.yaml")
TEMPLATE = GROUP["spec"]["leaderWorkerTemplate"]
GROUP_PODS = {name: TEMPLATE[f"{name}Template"]["spec"] for name in ("leader", "worker")}
PODS = {"node": POD, **GROUP_PODS}
"""Every pod of the folder: one server on a node, and leader and worker of a group."""
TEXTS = {
    "node": of_kind("ConfigMap")["data"]["gimbal.toml"],
    "group": read(GROUP_FOLDER / "configmap.yaml")["data"]["gimbal.toml"],
}
CONFIGS = {name: tomllib.loads(text) for name, text in TEXTS.items()}


def tool(name: str) -> str:
    """Return the path of a program that pip installed."""
    return str(Path(sys.executable).with_name(name))


def validate(manifests: list[dict[str, Any]], folder: Path, version: str) -> None:
    """Check manifests with the schemas of a version of Kubernetes. Unknown fields are errors."""
    (folder / "all.yaml").write_text(yaml.safe_dump_all(manifests))
    command = [tool("kubernetes-validate"), "--strict", "-k", version, "all.yaml"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert output.count(" passed for resource ") == len(manifests), output
