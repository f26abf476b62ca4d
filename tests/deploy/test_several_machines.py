"""Manifests, batch script and document for several nodes agree with the program, LeaderWorkerSet, SLURM and jax."""

import json
import re
import shlex
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from gimbal_jax.cli.main import app
from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.serve.processes import explicit_processes
from gimbal_jax.cli.serve.toml_file import options_from
from tests.cli.test_main import gimbal
from tests.deploy.manifests import (
    CONFIGS,
    CONTAINER,
    DEPLOY,
    GROUP,
    GROUP_FOLDER,
    GROUP_PODS,
    TEMPLATE,
    TEXTS,
    VERSIONS,
    documents,
    of_kind,
    read,
    validate,
)

SBATCH = DEPLOY / "slurm" / "gimbal.sbatch"
MULTIHOST = (DEPLOY.parent / "docs" / "multihost.md").read_text()
SHELL = [
    line
    for page in (MULTIHOST, (DEPLOY / "README.md").read_text())
    for block in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
CONTAINERS = {name: pod["containers"][0] for name, pod in GROUP_PODS.items()}
CONFIG = CONFIGS["group"]
GIVEN = {"LWS_LEADER_ADDRESS": "gimbal-group-0.gimbal-group.default", "LWS_GROUP_SIZE": str(TEMPLATE["size"])}
"""Variables that LeaderWorkerSet sets in every container, apart from LWS_WORKER_INDEX."""


def served(arguments: list[str]) -> dict[str, Any]:
    """Parse the arguments of ``gimbal serve`` with its own parser."""
    command: Any = typer.main.get_command(app)
    return command.commands["serve"].make_context("serve", arguments).params


def options_of(name: str, index: int, tmp_path: Path) -> ServeOptions:
    """Return the options of a pod's process, with its variables expanded and its configuration mounted."""
    (tmp_path / "gimbal.toml").write_text(TEXTS["group"])
    variables = GIVEN | {"LWS_WORKER_INDEX": str(index), "POD_IP": "10.1.2.3"}
    first, *arguments = (
        re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], argument).replace("/etc/gimbal/", f"{tmp_path}/")
        for argument in CONTAINERS[name]["args"]
    )
    assert first == "serve"
    return options_from(served(arguments), {})


# -- LeaderWorkerSet ----------------------------------------------------------


def test_the_group_satisfies_the_schemas(tmp_path):
    # kubernetes-validate has no schema of LeaderWorkerSet. Names of v1: sigs.k8s.io/lws, api/leaderworkerset/v1.
    assert GROUP["spec"].keys() <= {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy"}
    assert TEMPLATE.keys() == {"size", "restartPolicy", "volumeClaimTemplates", "leaderTemplate", "workerTemplate"}
    pieces = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": TEMPLATE[f"{name}Template"]}
        for name in GROUP_PODS
    ]
    claims = [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", **one} for one in TEMPLATE["volumeClaimTemplates"]]
    validate([*pieces, *claims, read(GROUP_FOLDER / "networkpolicy.yaml")], tmp_path, VERSIONS[-1])


def test_patches_change_manifests_that_exist():
    kustomization = read(GROUP_FOLDER / "kustomization.yaml")
    present = {file.name for file in GROUP_FOLDER.iterdir()} - {"kustomization.yaml"}
    named = [*kustomization["resources"], *(patch["path"] for patch in kustomization["patches"] if "path" in patch)]
    assert set(named) == present | {"../kubernetes"}
    originals = [one for name in of_kind("Kustomization")["resources"] for one in documents(name)]
    for patch in kustomization["patches"]:
        change = yaml.safe_load(patch["patch"]) if "patch" in patch else read(GROUP_FOLDER / patch["path"])
        name = change["metadata"]["name"]
        assert (change["kind"], name) in [(one["kind"], one["metadata"]["name"]) for one in originals]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_builds_one_server_whose_clients_reach_the_leader(tmp_path):
    ended = subprocess.run(["kubectl", "kustomize", str(GROUP_FOLDER)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    built = list(yaml.safe_load_all(ended.stdout))
    validate([one for one in built if one["kind"] != "LeaderWorkerSet"], tmp_path, VERSIONS[-1])
    assert "Deployment" not in {one["kind"] for one in built}
    (service,) = [one for one in built if one["kind"] == "Service"]
    labels = {name: TEMPLATE[f"{name}Template"]["metadata"]["labels"].items() for name in GROUP_PODS}
    selector = service["spec"]["selector"].items()
    assert selector <= labels["leader"] and not selector <= labels["worker"]


def test_processes_of_a_group_find_each_other(tmp_path):
    leader, follower = options_of("leader", 0, tmp_path), options_of("worker", 1, tmp_path)
    first, second = explicit_processes(leader), explicit_processes(follower)
    assert (first.count, first.index, second.count, second.index) == (2, 0, 2, 1)
    assert second.coordinator[0] == GIVEN["LWS_LEADER_ADDRESS"]
    ports = {port["name"]: port["containerPort"] for port in CONTAINERS["leader"]["ports"]}
    assert all(port in CONTAINERS["leader"]["ports"] for port in CONTAINER["ports"])
    for process in (first, second):
        assert (process.coordinator[1], process.command_port) == (ports["coordinator"], ports["commands"])
    # All other options come from the same file.
    assert {name for name in ServeOptions.__dataclass_fields__ if getattr(leader, name) != getattr(follower, name)} == {
        "coordinator",
        "process",
    }


def test_containers_have_the_variables_that_they_use():
    for container in CONTAINERS.values():
        own = {entry["name"] for entry in container.get("env", [])}
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert used <= GIVEN.keys() | {"LWS_WORKER_INDEX"} | own and own <= used


def test_the_mesh_takes_all_gpus_and_no_engine_crosses_nodes():
    for container in CONTAINERS.values():
        for kind in ("requests", "limits"):
            gpus = int(container["resources"][kind]["nvidia.com/gpu"])
            assert TEMPLATE["size"] * gpus == CONFIG["dp"] * CONFIG["tp"]
            assert gpus % CONFIG["tp"] == 0


def test_only_the_group_reaches_its_ports():
    spec = read(GROUP_FOLDER / "networkpolicy.yaml")["spec"]
    group = {"matchLabels": {"leaderworkerset.sigs.k8s.io/name": GROUP["metadata"]["name"]}}
    # All ports, because NCCL chooses its own. No namespaceSelector, so this namespace alone.
    assert (spec["podSelector"], spec["ingress"]) == (group, [{"from": [{"podSelector": group}]}])
    # The headless Service of the set must not take the name of the Service for clients.
    assert GROUP["metadata"]["name"] != of_kind("Service")["metadata"]["name"]


# -- SLURM --------------------------------------------------------------------


def test_the_job_asks_for_what_its_command_needs():
    assert subprocess.run(["bash", "-n", SBATCH]).returncode == 0
    script = SBATCH.read_text()
    given = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.MULTILINE))
    assert len(given) == script.count("\n#SBATCH ")
    (line,) = re.findall(r"^srun .* gimbal serve (.*)$", script.replace("\\\n", " "), re.MULTILINE)
    params = served([word for word in shlex.split(line) if word != "$@"])
    assert params["coordinator"] == "auto" and params["secret_file"] and params["placement_state"]
    assert params["dp"] * params["tp"] == int(given["nodes"]) * int(given["gpus-per-node"])
    assert int(given["gpus-per-node"]) % params["tp"] == 0 and given["ntasks-per-node"] == "1"
    # The steps get the signal, not the script, and have time to drain.
    name, seconds = given["signal"].split("@")
    assert name == "TERM" and int(seconds) >= params["drain_timeout"] + 30
    assert params["host"] == "0.0.0.0" and params["api_keys"]


@pytest.mark.parametrize(("ended", "requeued"), [(0, False), (1, True), (2, False), (137, True)])
def test_a_lost_process_puts_the_job_back_into_the_queue(tmp_path, ended, requeued):
    for name, body in {"srun": f'echo "$@" > srun; exit {ended}', "scontrol": 'echo "$@" > queue'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n".replace("> ", f"> {tmp_path}/asked-"))
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/me", "SLURM_JOB_ID": "17"}
    command = ["bash", str(SBATCH), "--http-port", "8000"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == ended, run.stderr
    assert (tmp_path / "asked-srun").read_text().endswith(" --http-port 8000\n")
    assert (tmp_path / "asked-queue").exists() == requeued
    if requeued:
        assert (tmp_path / "asked-queue").read_text() == "requeue 17\n"


# -- the document -------------------------------------------------------------


def planned(*gpus: str) -> Any:
    """Return the recommended mesh of ``gimbal mesh plan``."""
    result = gimbal("mesh", "plan", "Qwen3-235B-A22B", "--json", "--gpus", *gpus)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (plan,) = [plan for plan in found["plans"] if plan["mesh"] == found["recommended"]]
    return plan


def test_the_document_shows_the_planned_meshes():
    for copies, plan in [(2, planned("8xH100")), (1, planned("2x8xH100", "--link", "ib400"))]:
        mesh = f"DP {plan['mesh']['dp']} x TP {plan['mesh']['tp']}"
        row = f"{copies * plan['concurrent']:,} | {plan['decode_seconds'] * 1e3:.1f} "
        row += f"| {copies * plan['requests_per_second']:.1f} |"
        assert re.search(rf"^\| .*{mesh} \| {re.escape(row)}$", MULTIHOST, re.MULTILINE), (mesh, row)
    # The manifests serve the recommended mesh.
    assert (CONFIG["dp"], CONFIG["tp"]) == (plan["mesh"]["dp"], plan["mesh"]["tp"])


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("gimbal ")])
def test_commands_parse(line: str):
    name, *arguments = shlex.split(line)[1:]
    command: Any = typer.main.get_command(app)
    command.commands[name].make_context(name, arguments)


def test_flags_in_the_document_exist():
    command: Any = typer.main.get_command(app)
    flags = {flag for parameter in command.commands["serve"].params for flag in parameter.opts}
    named = set(re.findall(r"`(--[a-z][a-z-]*)", MULTIHOST))
    others = {"--gpus", "--link", "--gpus-per-node", "--gpus-per-task"}
    assert "--coordinator" in named and named <= flags | others


def test_jax_finds_what_the_document_says_of_slurm(monkeypatch):
    from jax._src.clusters import ClusterEnv

    def found() -> tuple[Any, ...]:
        return ClusterEnv.auto_detect_unset_distributed_params(None, None, None, [], None, 300)

    (row,) = re.findall(r"^\| SLURM \|.*$", MULTIHOST, re.MULTILINE)
    slurm = {"SLURM_STEP_NODELIST": "node[07-08]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    for name, value in (slurm | {"SLURM_JOB_ID": "8195"}).items():
        assert f"`{name}`" in row
        monkeypatch.setenv(name, value)
    assert "port 61440 + job id modulo 4096" in row
    assert found() == (f"node07:{61440 + 8195 % 4096}", 2, 1, [])
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "7000")
    assert found()[0] == "node07:7000"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_documents_commands_make_certificates(tmp_path):
    commands = [line for line in SHELL if line.startswith("openssl req ")]
    assert len(commands) == 2
    for command in commands:
        assert subprocess.run(shlex.split(command), cwd=tmp_path, capture_output=True).returncode == 0
    for name in ("command", "coordinator"):
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / f"{name}.crt", tmp_path / f"{name}.key")
    shown = subprocess.run(
        ["openssl", "x509", "-in", "coordinator.crt", "-noout", "-ext", "subjectAltName"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    ).stdout
    (prefix,) = re.findall(r"JAX_MTLS_PEER_URI_PREFIX=(\S+)", MULTIHOST)
    assert prefix.endswith("/") and f"URI:{prefix}" in shown
