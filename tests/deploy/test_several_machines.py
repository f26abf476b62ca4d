"""Manifests, batch script and document for several machines: true to the program, to LeaderWorkerSet, SLURM and jax."""

import json
import re
import shlex
import shutil
import ssl
import subprocess
import tomllib
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
from tests.deploy.test_deploy import CONTAINER, DEPLOY, POD, VERSIONS, documents, of_kind, tool

GROUP_FOLDER = DEPLOY / "leaderworkerset"
SBATCH = DEPLOY / "slurm" / "gimbal.sbatch"
MULTIHOST = (DEPLOY.parent / "docs" / "multihost.md").read_text()
SHELL = [
    line
    for page in (MULTIHOST, (DEPLOY / "README.md").read_text())
    for block in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((GROUP_FOLDER / name).read_text())


GROUP = read("leaderworkerset.yaml")
TEMPLATE = GROUP["spec"]["leaderWorkerTemplate"]
PODS = {name: TEMPLATE[f"{name}Template"]["spec"] for name in ("leader", "worker")}
CONTAINERS = {name: pod["containers"][0] for name, pod in PODS.items()}
CONFIG_TOML = read("configmap.yaml")["data"]["gimbal.toml"]
CONFIG = tomllib.loads(CONFIG_TOML)
GIVEN = {"LWS_LEADER_ADDRESS": "gimbal-group-0.gimbal-group.default", "LWS_GROUP_SIZE": str(TEMPLATE["size"])}
"""What LeaderWorkerSet tells every container, besides LWS_WORKER_INDEX."""


def served(arguments: list[str]) -> dict[str, Any]:
    """Options of a ``gimbal serve`` with these arguments, as its own parser takes them."""
    command: Any = typer.main.get_command(app)
    return command.commands["serve"].make_context("serve", arguments).params


def options_of(name: str, index: int, tmp_path: Path) -> ServeOptions:
    """Those of a pod's process: Kubernetes has put the variables in, and the configuration is mounted."""
    (tmp_path / "gimbal.toml").write_text(CONFIG_TOML)
    variables = GIVEN | {"LWS_WORKER_INDEX": str(index), "POD_IP": "10.1.2.3"}
    first, *arguments = (
        re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], argument).replace("/etc/gimbal/", f"{tmp_path}/")
        for argument in CONTAINERS[name]["args"]
    )
    assert first == "serve"
    params = served(arguments)
    return options_from(params, {})


# -- LeaderWorkerSet ----------------------------------------------------------


def test_the_group_is_of_the_leaderworkerset_api(tmp_path):
    assert (GROUP["apiVersion"], GROUP["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    # Names of v1: sigs.k8s.io/lws, api/leaderworkerset/v1.
    assert GROUP["spec"].keys() <= {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy"}
    assert TEMPLATE.keys() == {"size", "restartPolicy", "volumeClaimTemplates", "leaderTemplate", "workerTemplate"}
    assert TEMPLATE["restartPolicy"] == "RecreateGroupOnPodRestart"
    pieces = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": TEMPLATE[f"{name}Template"]}
        for name in PODS
    ]
    claims = [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", **one} for one in TEMPLATE["volumeClaimTemplates"]]
    assert validated([*pieces, *claims, read("networkpolicy.yaml")], tmp_path)


def validated(manifests: list[dict[str, Any]], folder: Path) -> bool:
    """Whether they are of Kubernetes' own schemas; asserts with its words."""
    (folder / "all.yaml").write_text(yaml.safe_dump_all(manifests))
    command = [tool("kubernetes-validate"), "--strict", "-k", VERSIONS[-1], "all.yaml"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return (ended.stdout + ended.stderr).count(" passed for resource ") == len(manifests)


def test_patches_are_of_what_they_patch():
    kustomization = read("kustomization.yaml")
    present = {file.name for file in GROUP_FOLDER.iterdir()} - {"kustomization.yaml"}
    named = [*kustomization["resources"], *(patch["path"] for patch in kustomization["patches"] if "path" in patch)]
    assert set(named) == present | {"../kubernetes"}
    for patch in kustomization["patches"]:
        change = yaml.safe_load(patch["patch"]) if "patch" in patch else read(patch["path"])
        originals = [one for name in of_kind("Kustomization")["resources"] for one in documents(name)]
        assert (change["kind"], change["metadata"]["name"]) in {
            (one["kind"], one["metadata"]["name"]) for one in originals
        }


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_builds_one_server(tmp_path):
    command = ["kubectl", "kustomize", str(GROUP_FOLDER)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    built = list(yaml.safe_load_all(ended.stdout))
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in built}
    assert by_name.keys() == {
        ("ConfigMap", "gimbal"),
        ("LeaderWorkerSet", "gimbal-group"),
        ("NetworkPolicy", "gimbal"),
        ("NetworkPolicy", "gimbal-group"),
        ("PersistentVolumeClaim", "gimbal-models"),
        ("PodDisruptionBudget", "gimbal"),
        ("Service", "gimbal"),
    }
    assert by_name["LeaderWorkerSet", "gimbal-group"] == GROUP
    assert tomllib.loads(by_name["ConfigMap", "gimbal"]["data"]["gimbal.toml"]) == CONFIG
    # Clients reach the leader alone; the budget is for all.
    labels = {name: TEMPLATE[f"{name}Template"]["metadata"]["labels"].items() for name in PODS}
    selector = by_name["Service", "gimbal"]["spec"]["selector"].items()
    assert selector <= labels["leader"] and not selector <= labels["worker"]
    budget = by_name["PodDisruptionBudget", "gimbal"]["spec"]["selector"]["matchLabels"].items()
    assert budget <= labels["leader"] and budget <= labels["worker"]
    assert validated([one for one in built if one["kind"] != "LeaderWorkerSet"], tmp_path)


def test_processes_of_a_group_find_each_other(tmp_path):
    leader, follower = options_of("leader", 0, tmp_path), options_of("worker", 1, tmp_path)
    first, second = explicit_processes(leader), explicit_processes(follower)
    assert (first.count, first.index, second.count, second.index) == (2, 0, 2, 1)
    assert second.coordinator[0] == GIVEN["LWS_LEADER_ADDRESS"]
    ports = {port["name"]: port["containerPort"] for port in CONTAINERS["leader"]["ports"]}
    for process in (first, second):
        assert (process.coordinator[1], process.command_port) == (ports["coordinator"], ports["commands"])
    policy = (GROUP_FOLDER / "networkpolicy.yaml").read_text()
    assert all(f"({ports[name]})" in policy for name in ("coordinator", "commands"))
    # All that is not told by the command line is the same file.
    assert {name for name in ServeOptions.__dataclass_fields__ if getattr(leader, name) != getattr(follower, name)} == {
        "coordinator",
        "process",
    }


def test_variables_are_those_that_a_container_has():
    for container in CONTAINERS.values():
        own = {entry["name"] for entry in container.get("env", [])}
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert used <= GIVEN.keys() | {"LWS_WORKER_INDEX"} | own and own <= used


def test_the_configuration_of_the_group_is_accepted(tmp_path):
    (tmp_path / "gimbal.toml").write_text(CONFIG_TOML)
    result = gimbal("serve", "--print-config", "--config", tmp_path / "gimbal.toml")
    assert result.exit_code == 0, result.output
    in_force = tomllib.loads(result.stdout)
    assert {key: in_force[key] for key in CONFIG} == CONFIG
    # What only the leader serves is what one node serves.
    alone = tomllib.loads(of_kind("ConfigMap")["data"]["gimbal.toml"])
    assert alone.keys() <= CONFIG.keys()
    same = {"host", "port", "http-host", "http-port", "operators-host", "operators-port", "api-keys", "tls-cert"}
    assert {key: CONFIG[key] for key in same} == {key: alone[key] for key in same}


def test_the_mesh_takes_all_gpus_and_no_engine_crosses_nodes():
    for container in CONTAINERS.values():
        for kind in ("requests", "limits"):
            gpus = int(container["resources"][kind]["nvidia.com/gpu"])
            assert TEMPLATE["size"] * gpus == CONFIG["dp"] * CONFIG["tp"]
            assert gpus % CONFIG["tp"] == 0


def test_the_leaders_pod_is_the_deployments_with_a_group():
    pod, container = PODS["leader"], CONTAINERS["leader"]
    assert {k: v for k, v in pod.items() if k not in ("containers", "volumes")} == {
        k: v for k, v in POD.items() if k not in ("containers", "volumes")
    }
    changed = {"args", "env", "ports", "resources", "startupProbe", "volumeMounts"}
    assert {k: v for k, v in container.items() if k not in changed} == {
        k: v for k, v in CONTAINER.items() if k not in changed
    }
    assert all(port in container["ports"] for port in CONTAINER["ports"])
    longer = {"failureThreshold": container["startupProbe"]["failureThreshold"]}
    assert container["startupProbe"] == CONTAINER["startupProbe"] | longer
    assert longer["failureThreshold"] > CONTAINER["startupProbe"]["failureThreshold"]
    assert all(mount in container["volumeMounts"] for mount in CONTAINER["volumeMounts"])
    assert all(volume in pod["volumes"] for volume in POD["volumes"] if volume["name"] != "cache")


def test_a_follower_serves_nobody():
    leader, follower = CONTAINERS["leader"], CONTAINERS["worker"]
    assert leader.keys() - follower.keys() == {
        "env",
        "ports",
        "startupProbe",
        "readinessProbe",
        "livenessProbe",
        "lifecycle",
    }
    assert all(follower[key] == leader[key] for key in ("image", "resources", "securityContext"))
    assert all(PODS["worker"][key] == PODS["leader"][key] for key in PODS["worker"].keys() - {"containers", "volumes"})
    mounted = {name: {mount["name"] for mount in one["volumeMounts"]} for name, one in CONTAINERS.items()}
    assert mounted["leader"] - mounted["worker"] == {"api-keys", "tls"}
    claimed = {one["metadata"]["name"] for one in TEMPLATE["volumeClaimTemplates"]}
    for name, pod in PODS.items():
        assert mounted[name] == {volume["name"] for volume in pod["volumes"]} | claimed
        assert len(pod["volumes"]) == len({volume["name"] for volume in pod["volumes"]})


def test_files_lie_in_mounted_volumes():
    mounts = {
        name: {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]} for name, one in CONTAINERS.items()
    }

    def volume(name: str, key: str) -> str:
        (found,) = [volume for path, volume in mounts[name].items() if CONFIG[key].startswith(f"{path}/")]
        return found

    paths = {key for key, value in CONFIG.items() if isinstance(value, str) and value.startswith("/")}
    assert paths > {"api-keys", "http-api-key-file", "tls-cert", "tls-key"}
    heeded = {"model": "models", "secret-file": "secret", "compile-cache": "cache"}
    assert {key: volume("worker", key) for key in heeded} == heeded
    assert {volume("leader", key) for key in paths} == {"models", "secret", "cache", "api-keys", "tls"}
    # A volume of the pod's own, which outlives it.
    assert volume("leader", "placement-state") in {one["metadata"]["name"] for one in TEMPLATE["volumeClaimTemplates"]}
    for pod in PODS.values():
        assert all(one["secret"]["defaultMode"] & 0o007 == 0 for one in pod["volumes"] if "secret" in one)


def test_only_the_group_reaches_the_groups_ports():
    spec = read("networkpolicy.yaml")["spec"]
    group = {"matchLabels": {"leaderworkerset.sigs.k8s.io/name": GROUP["metadata"]["name"]}}
    # All ports, because NCCL chooses its own; no namespaceSelector, so this namespace alone.
    assert spec == {
        "podSelector": group,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": group}]}],
    }
    # The set's headless Service must not take the name of the one for clients.
    assert GROUP["metadata"]["name"] != of_kind("Service")["metadata"]["name"]


# -- SLURM --------------------------------------------------------------------


def directives() -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SBATCH.read_text(), re.MULTILINE)
    assert len(lines) == SBATCH.read_text().count("\n#SBATCH ")
    return dict(lines)


def test_bash_reads_the_script():
    assert subprocess.run(["bash", "-n", SBATCH], timeout=60).returncode == 0


def test_the_job_asks_for_what_its_command_needs():
    given = directives()
    (line,) = re.findall(r"^srun .* gimbal serve (.*)$", SBATCH.read_text().replace("\\\n", " "), re.MULTILINE)
    params = served([word for word in shlex.split(line) if word != "$@"])
    assert params["coordinator"] == "auto" and params["secret_file"] and params["placement_state"]
    assert params["dp"] * params["tp"] == int(given["nodes"]) * int(given["gpus-per-node"])
    assert int(given["gpus-per-node"]) % params["tp"] == 0 and given["ntasks-per-node"] == "1"
    # The steps get the signal, not the script; and time to drain.
    name, seconds = given["signal"].split("@")
    assert name == "TERM" and int(seconds) >= params["drain_timeout"] + 30
    assert params["host"] == "0.0.0.0" and params["api_keys"]


@pytest.mark.parametrize(("ended", "again"), [(0, False), (1, True), (2, False), (137, True)])
def test_a_lost_process_puts_the_job_back_into_the_queue(tmp_path, ended, again):
    for name, body in {"srun": f'echo "$@" > srun; exit {ended}', "scontrol": 'echo "$@" > queue'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n".replace("> ", f"> {tmp_path}/asked-"))
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/me", "SLURM_JOB_ID": "17"}
    command = ["bash", str(SBATCH), "--http-port", "8000"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == ended, run.stderr
    assert (tmp_path / "asked-srun").read_text().endswith(" --http-port 8000\n")
    assert (tmp_path / "asked-queue").exists() == again
    if again:
        assert (tmp_path / "asked-queue").read_text() == "requeue 17\n"


# -- the document -------------------------------------------------------------


def planned(*gpus: str) -> Any:
    """The recommended mesh of ``gimbal mesh plan``."""
    result = gimbal("mesh", "plan", "Qwen3-235B-A22B", "--json", "--gpus", *gpus)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (plan,) = [plan for plan in found["plans"] if plan["mesh"] == found["recommended"]]
    return plan


def test_copies_and_one_server_are_as_planned():
    for copies, plan in [(2, planned("8xH100")), (1, planned("2x8xH100", "--link", "ib400"))]:
        mesh = f"DP {plan['mesh']['dp']} x TP {plan['mesh']['tp']}"
        row = f"{copies * plan['concurrent']:,} | {plan['decode_seconds'] * 1e3:.1f} "
        row += f"| {copies * plan['requests_per_second']:.1f} |"
        assert re.search(rf"^\| .*{mesh} \| {re.escape(row)}$", MULTIHOST, re.MULTILINE), (mesh, row)
    # The manifests and the script serve the recommended mesh.
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


def test_what_jax_finds_is_what_the_document_says(monkeypatch):
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
def test_certificates_are_made_as_the_document_says(tmp_path):
    commands = [line for line in SHELL if line.startswith("openssl req ")]
    assert len(commands) == 2
    for command in commands:
        assert subprocess.run(shlex.split(command), cwd=tmp_path, capture_output=True, timeout=60).returncode == 0
    for name in ("command", "coordinator"):
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / f"{name}.crt", tmp_path / f"{name}.key")
    shown = subprocess.run(
        ["openssl", "x509", "-in", "coordinator.crt", "-noout", "-ext", "subjectAltName"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    (prefix,) = re.findall(r"JAX_MTLS_PEER_URI_PREFIX=(\S+)", MULTIHOST)
    assert prefix.endswith("/") and f"URI:{prefix}" in shown
