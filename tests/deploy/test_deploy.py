"""The image and the manifests: linted by others' tools, and true to the program that they start."""

import json
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from gimbal_jax.cli.serve.options import hints, policy_hints
from gimbal_jax.config import NetworkConfig
from gimbal_jax.version import __version__
from tests.cli.test_main import gimbal

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
OPTIONAL = ["kustomization.yaml", "servicemonitor.yaml"]
"""Not of Kubernetes itself, so that its schemas do not know them."""
MANIFESTS = sorted(path.name for path in KUBERNETES.glob("*.yaml") if path.name not in OPTIONAL)
VERSIONS = ("1.34", "1.37")


def tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [one for name in [*MANIFESTS, *OPTIONAL] for one in documents(name) if one["kind"] == kind]
    return found


POD = of_kind("Deployment")["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
CONFIG_TOML = of_kind("ConfigMap")["data"]["gimbal.toml"]
CONFIG = tomllib.loads(CONFIG_TOML)
PORTS = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}


# -- linters ------------------------------------------------------------------


def test_hadolint_finds_nothing_in_the_dockerfile():
    ended = subprocess.run([tool("hadolint"), DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stdout + ended.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_of_kubernetes_own_schemas(version):
    command = [tool("kubernetes-validate"), "--strict", "-k", version, *MANIFESTS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=KUBERNETES)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (ended.stdout + ended.stderr).count(" passed for resource ") == sum(len(documents(n)) for n in MANIFESTS)


def test_the_schemas_are_strict(tmp_path):
    text = (KUBERNETES / "service.yaml").read_text().replace("targetPort: grpc", "targetport: grpc")
    (tmp_path / "service.yaml").write_text(text)
    command = [tool("kubernetes-validate"), "--strict", "-k", VERSIONS[0], "service.yaml"]
    assert subprocess.run(command, capture_output=True, timeout=60, cwd=tmp_path).returncode != 0


def test_the_kustomization_is_all_that_every_cluster_knows():
    assert of_kind("Kustomization")["resources"] == MANIFESTS


# -- options --------------------------------------------------------------------


def test_the_configuration_is_accepted_and_means_what_it_says(tmp_path):
    (tmp_path / "gimbal.toml").write_text(CONFIG_TOML)
    result = gimbal("serve", "--print-config", "--config", tmp_path / "gimbal.toml")
    assert result.exit_code == 0, result.output
    in_force = tomllib.loads(result.stdout)
    assert {key: in_force[key] for key in CONFIG} == CONFIG


def test_every_flag_and_command_in_the_folder_exists():
    known = {f"--{key.replace('_', '-')}" for key in hints() | policy_hints()} | {"--config", "--print-config"}
    texts = {
        path: path.read_text() for path in DEPLOY.rglob("*") if path.suffix in (".md", ".yaml", "") and path.is_file()
    }
    assert DEPLOY / "README.md" in texts
    for path, text in texts.items():
        for line in text.replace("\\\n", " ").splitlines():
            if "gimbal serve" in line or ("gimbal-jax:" in line and " serve " in line):
                used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line.split("serve", 1)[1]))
                assert used <= known, (path, line)
    args = CONTAINER["args"]
    assert args[0] == "serve" and args[1::2] == ["--config"]


# -- agreement ------------------------------------------------------------------


def test_ports_agree_everywhere():
    assert {"grpc": CONFIG["port"], "http": CONFIG["http-port"], "operators": CONFIG["operators-port"]} == PORTS
    assert CONFIG["port"] == NetworkConfig.port
    (exposed,) = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)
    assert {int(port) for port in exposed.split()} == set(PORTS.values())
    assert {port["targetPort"]: port["port"] for port in of_kind("Service")["spec"]["ports"]} == PORTS
    allowed = [port["port"] for rule in of_kind("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]]
    assert sorted(allowed) == sorted(PORTS)
    assert f"127.0.0.1:{PORTS['operators']}/health" in DOCKERFILE
    (endpoint,) = of_kind("ServiceMonitor")["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("operators", "/metrics")


def test_probes_ask_what_the_operators_port_answers():
    from gimbal_jax.serving.monitoring import operators

    source = Path(operators.__file__).read_text()
    for probe, path in [("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")]:
        assert CONTAINER[probe]["httpGet"] == {"path": path, "port": "operators"}
        assert f'"{path}"' in source
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1200, "large models load and compile for long"
    assert (
        of_kind("Deployment")["spec"]["progressDeadlineSeconds"]
        > startup["periodSeconds"] * startup["failureThreshold"]
    )


def test_the_pod_lives_longer_than_its_drain():
    before = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] >= before + CONFIG["drain-timeout"] + 30
    # Long enough for every endpoint to have heard of it: readiness fails within this time.
    assert before >= 5


def test_files_of_the_configuration_lie_in_mounted_volumes():
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert set(mounts.values()) == set(volumes)
    paths = [value for value in CONFIG.values() if isinstance(value, str) and value.startswith("/")]
    paths += [CONTAINER["args"][2]]
    assert len(paths) >= 6
    for path in paths:
        assert any(path.startswith(f"{mount}/") for mount in mounts), path
    claims = {claim["metadata"]["name"] for claim in documents("volumes.yaml")}
    used = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
    assert used == claims
    assert volumes["config"]["configMap"]["name"] == of_kind("ConfigMap")["metadata"]["name"]
    # The server warns of secrets that every user can read.
    for volume in volumes.values():
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] & 0o007 == 0
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_keys_and_tls_guard_what_other_hosts_reach():
    assert CONFIG["host"] == CONFIG["http-host"] == CONFIG["operators-host"] == "0.0.0.0"
    assert {"api-keys", "http-api-key-file", "tls-cert", "tls-key"} <= CONFIG.keys()


def test_gpus_are_those_of_the_mesh():
    for kind in ("requests", "limits"):
        assert CONTAINER["resources"][kind]["nvidia.com/gpu"] == str(CONFIG["dp"] * CONFIG["tp"])


def test_labels_select_the_pods():
    labels = of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        of_kind("Deployment")["spec"]["selector"]["matchLabels"],
        of_kind("Service")["spec"]["selector"],
        of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector == labels for selector in selectors)
    service_labels = of_kind("Service")["metadata"]["labels"]
    assert of_kind("ServiceMonitor")["spec"]["selector"]["matchLabels"].items() <= service_labels.items()


def test_nothing_runs_as_root_or_writes_where_it_need_not():
    user = POD["securityContext"]["runAsUser"]
    assert POD["securityContext"]["runAsNonRoot"] and f"\nUSER {user}:{user}\n" in DOCKERFILE
    assert POD["securityContext"]["fsGroup"] == user
    context = CONTAINER["securityContext"]
    assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert not POD["automountServiceAccountToken"]


# -- the image --------------------------------------------------------------------


def test_the_image_is_pinned_and_of_this_version():
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(bases) == 2 and set(bases) == {bases[0]}
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", bases[0])
    assert CONTAINER["image"] == f"gimbal-jax:{__version__}"
    for path in (DEPLOY / "Dockerfile", DEPLOY / "README.md"):
        assert set(re.findall(r"gimbal-jax:([\w.]+)", path.read_text())) == {__version__}


def test_the_image_gets_what_it_copies_and_nothing_more():
    (copied,) = re.findall(r"^COPY (pyproject\.toml .*) \./$", DOCKERFILE, re.MULTILINE)
    wanted = {*copied.split(), "gimbal_jax"}
    assert all((DEPLOY.parent / name).exists() for name in wanted)
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == wanted
    assert "*" in lines


def test_the_image_installs_extras_that_exist():
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'"\.\[(.*?)\]"', DOCKERFILE)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    # Its Python is one that the package takes, and the one that constraints.txt was made with.
    assert f"python:3.{sys.version_info.minor}." in DOCKERFILE or sys.version_info.minor != 13


def test_the_image_stops_and_starts_as_the_command_does():
    lines = DOCKERFILE.splitlines()
    assert "STOPSIGNAL SIGTERM" in lines and 'ENTRYPOINT ["gimbal"]' in lines
    (check,) = re.findall(r"HEALTHCHECK .*\n\s+CMD (.*)", DOCKERFILE)
    program, option, code = json.loads(check)
    assert (program, option) == ("python", "-c")

    answers = iter((200, 503))

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(next(answers) if self.path == "/health" else 404)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = code.replace(":9090/", f":{server.server_port}/")
        for healthy in (True, False):
            ended = subprocess.run([sys.executable, "-c", asked], capture_output=True, timeout=60)
            assert (ended.returncode == 0) == healthy
        server.shutdown()
