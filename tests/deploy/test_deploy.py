"""The image and the manifests for one node agree with their schemas, with each other and with the program."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from gimbal_jax.cli.serve.options import hints, policy_hints
from gimbal_jax.config import NetworkConfig
from gimbal_jax.serving.monitoring import operators
from gimbal_jax.version import __version__
from tests.cli.test_main import gimbal
from tests.deploy.manifests import (
    CONFIGS,
    CONTAINER,
    DEPLOY,
    MANIFESTS,
    POD,
    PODS,
    TEMPLATE,
    TEXTS,
    VERSIONS,
    documents,
    of_kind,
    tool,
    validate,
)

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
CONFIG = CONFIGS["node"]
PORTS = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}


def test_hadolint_accepts_the_dockerfile():
    ended = subprocess.run([tool("hadolint"), DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stdout + ended.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_satisfy_the_schemas_of_kubernetes(tmp_path, version):
    validate([one for name in MANIFESTS for one in documents(name)], tmp_path, version)


def test_the_kustomization_lists_every_manifest():
    assert of_kind("Kustomization")["resources"] == MANIFESTS


@pytest.mark.parametrize("name", CONFIGS)
def test_the_server_accepts_the_configuration(tmp_path, name):
    (tmp_path / "gimbal.toml").write_text(TEXTS[name])
    result = gimbal("serve", "--print-config", "--config", tmp_path / "gimbal.toml")
    assert result.exit_code == 0, result.output
    printed = tomllib.loads(result.stdout)
    assert {key: printed[key] for key in CONFIGS[name]} == CONFIGS[name]


def test_every_flag_in_the_folder_exists():
    known = {f"--{key.replace('_', '-')}" for key in hints() | policy_hints()} | {"--config", "--print-config"}
    found: set[str] = set()
    for path in (path for path in DEPLOY.rglob("*") if path.suffix in (".md", ".yaml", "") and path.is_file()):
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if "gimbal serve" in line or ("gimbal-jax:" in line and " serve " in line):
                used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line.split("serve", 1)[1]))
                assert used <= known, (path, line)
                found |= used
    assert len(found) > 3


def test_ports_agree_in_configuration_pod_service_policy_and_image():
    assert {"grpc": CONFIG["port"], "http": CONFIG["http-port"], "operators": CONFIG["operators-port"]} == PORTS
    assert CONFIG["port"] == NetworkConfig.port
    (exposed,) = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)
    assert {int(port) for port in exposed.split()} == set(PORTS.values())
    assert {port["targetPort"]: port["port"] for port in of_kind("Service")["spec"]["ports"]} == PORTS
    allowed = [port["port"] for rule in of_kind("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]]
    assert sorted(allowed) == sorted(PORTS)
    assert f"127.0.0.1:{PORTS['operators']}/health" in DOCKERFILE
    (endpoint,) = of_kind("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["port"] in PORTS


def test_the_operators_port_answers_every_probe():
    source = Path(operators.__file__).read_text()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = CONTAINER[probe]["httpGet"]
        assert asked["port"] == "operators" and f'"{asked["path"]}"' in source


def test_the_pod_outlives_the_drain():
    for pod in (POD, PODS["leader"]):
        before = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] >= before + CONFIG["drain-timeout"] + 30


@pytest.mark.parametrize("name", PODS)
def test_every_configured_file_lies_in_a_mounted_volume(name):
    pod, config = PODS[name], CONFIGS["node" if name == "node" else "group"]
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    claims = {one["metadata"]["name"] for one in TEMPLATE["volumeClaimTemplates"]} if name != "node" else set()
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]} | claims
    # A follower reads only these of the configuration that it shares with the leader.
    read = config.keys() if name != "worker" else {"model", "secret-file", "compile-cache"}
    paths = [config[key] for key in read if str(config[key]).startswith("/")]
    for path in [*paths, "/etc/gimbal/gimbal.toml"]:
        assert any(path.startswith(f"{mount}/") for mount in mounts), path
    # Other users must not read secrets: the server warns of that.
    assert all(one["secret"]["defaultMode"] & 0o007 == 0 for one in pod["volumes"] if "secret" in one)


def test_names_that_manifests_share_agree():
    labels = of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        of_kind("Deployment")["spec"]["selector"]["matchLabels"],
        of_kind("Service")["spec"]["selector"],
        of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector == labels for selector in selectors)
    monitored = of_kind("ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= of_kind("Service")["metadata"]["labels"].items()
    volumes = [volume for volume in POD["volumes"] if "persistentVolumeClaim" in volume]
    claims = {claim["metadata"]["name"] for claim in documents("volumes.yaml")}
    assert {volume["persistentVolumeClaim"]["claimName"] for volume in volumes} == claims
    user = POD["securityContext"]["runAsUser"]
    assert f"\nUSER {user}:{user}\n" in DOCKERFILE


def test_gpus_are_those_of_the_mesh():
    for kind in ("requests", "limits"):
        assert CONTAINER["resources"][kind]["nvidia.com/gpu"] == str(CONFIG["dp"] * CONFIG["tp"])


def test_images_are_of_this_version():
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(bases) == 2 and bases[0] == bases[1]
    assert {pod["containers"][0]["image"] for pod in PODS.values()} == {f"gimbal-jax:{__version__}"}
    for path in (DEPLOY / "Dockerfile", DEPLOY / "README.md"):
        assert set(re.findall(r"gimbal-jax:([\w.]+)", path.read_text())) == {__version__}


def test_the_image_copies_files_and_installs_extras_that_exist():
    (copied,) = re.findall(r"^COPY (pyproject\.toml .*) \./$", DOCKERFILE, re.MULTILINE)
    wanted = {*copied.split(), "gimbal_jax"}
    assert all((DEPLOY.parent / name).exists() for name in wanted)
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in lines and {line.removeprefix("!") for line in lines if line.startswith("!")} == wanted
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'"\.\[(.*?)\]"', DOCKERFILE)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
