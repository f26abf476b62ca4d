"""``gimbal mesh``: plans, errors and pictures, as a user sees them."""

import json
import shlex

import matplotlib.image
import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from gimbal_jax.cli.main import app
from gimbal_jax.config import GPU_ENGINE, MeshConfig
from gimbal_jax.model.hf_config import PRESETS
from gimbal_jax.planning.hardware import gpu_kinds, link_kinds
from gimbal_jax.planning.models import HUB_IDS, PlannedModel, find_model
from gimbal_jax.planning.plan import PlanRequest, plan_mesh
from gimbal_jax.scheduler.counts_file import save_placement
from tests.cli.test_main import BASE

PAPER = ("plan", "Qwen3-30B-A3B", "--gpus", "4xH100")


def mesh(*arguments: object) -> Result:
    words = ["mesh", *map(str, arguments)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "100", "TERM": "dumb"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_plan_shows_every_mesh_and_recommends_one():
    result = mesh(*PAPER)
    assert result.exit_code == 0, result.output
    for line in (
        " 4 x 1 ",
        " 2 x 2 *",
        " 1 x 4 ",
        "Recommended: DP 2 x TP 2",
        "187.5 MiB",
        "Estimated, not measured",
    ):
        assert line in result.stdout
    plan = plan_mesh(PlanRequest(find_model("qwen3-30b-a3b").config, gpu_kinds()["H100"], 4), MeshConfig(2, 2))
    assert f"{plan.kv_tokens:,}" in result.stdout  # type: ignore[union-attr]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_numbers_are_never_cut_off(columns):
    words = ["mesh", *PAPER]
    text = CliRunner().invoke(app, words, env={"COLUMNS": str(columns), "TERM": "dumb"}).stdout
    rows = [line.split() for line in text.splitlines() if line.startswith((" 4 x 1", " 2 x 2", " 1 x 4"))]
    assert [row[:3] for row in rows] == [["4", "x", "1"], ["2", "x", "2"], ["1", "x", "4"]]
    assert [row[-5] for row in rows] == ["583,808", "1,199,872", "2,430,784"]
    assert "…" not in text


def test_options_reach_the_plan():
    request = ("plan", "Qwen3-30B-A3B", "--gpus", "8xA100-80")  # whose kernels take float32
    options = ("--page-size", 16, "--max-rows", 64, "--token-budget", 4096, "--memory-utilisation", 0.8)
    more = ("--request-tokens", 8000, "--output-tokens", 100, "--dtype", "float32", "--exchange", "sparse")
    found = json.loads(mesh(*request, *options, *more, "--json").stdout)
    engine = found["engine"]
    assert [engine[name] for name in ("page_size", "max_rows", "token_budget", "exchange", "max_model_len")] == [
        16,
        64,
        4096,
        "sparse",
        8000,
    ]
    plain = json.loads(mesh(*request, "--json").stdout)
    assert found["plans"][0]["memory"]["weights"]["experts"] == 2 * plain["plans"][0]["memory"]["weights"]["experts"]
    for plan in found["plans"]:
        assert plan["concurrent"] == plan["mesh"]["dp"] * (plan["kv_tokens"] // 8000)


def test_length_engines_and_placement_reach_the_plan():
    options = ("--max-model-len", 32768, "--dp", 2, "--placement", "static")
    found = json.loads(mesh(*PAPER, *options, "--json").stdout)
    assert found["engine"]["max_model_len"] == 32768
    (plan,) = found["plans"]
    assert (plan["mesh"]["dp"], plan["memory"]["migration"]) == (2, 0)
    line = mesh(*PAPER, *options, "--command").stdout
    assert "--dp 2 --tp 2" in line and "--max-model-len 32768" in line and "--placement static" in line


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_model_goes_by_its_hub_id_too(name):
    assert find_model(HUB_IDS[name]) == find_model(name.upper()) == PlannedModel(name, HUB_IDS[name], PRESETS[name])


def test_sixteen_gpus_are_two_nodes_of_eight():
    text = mesh("plan", "Qwen3-235B-A22B", "--gpus", "16xH100", "--link", "ib400").stdout
    assert "on 2 nodes of 8 x H100 over ib400" in text
    assert text == mesh("plan", "Qwen3-235B-A22B", "--gpus", "2x8xH100", "--link", "ib400").stdout
    assert "on 16 x H100" in mesh("plan", "Qwen3-235B-A22B", "--gpus", "1x16xH100").stdout


def test_a_checkpoint_folder_is_a_model_too():
    found = json.loads(mesh("plan", BASE, "--gpus", "2xL40S", "--request-tokens", 256, "--json").stdout)
    assert found["model"] == str(BASE)
    assert len(found["plans"]) == 2


@pytest.mark.parametrize("options", [(), ("--tp", 2), ("--tp", 4, "--exchange", "sparse", "--max-rows", 64)], ids=str)
def test_the_command_is_one_line_that_serve_takes(options):
    (line,) = mesh(*PAPER, *options, "--command").stdout.splitlines()
    program, name, *arguments = shlex.split(line)
    assert (program, name) == ("gimbal", "serve")
    assert arguments[0] == "Qwen/Qwen3-30B-A3B"  # which the server fetches
    group = typer.main.get_command(app)
    serve = group.commands["serve"]  # type: ignore[attr-defined]
    values = serve.make_context(name, arguments).params
    asked = dict(zip(options[::2], options[1::2], strict=True))
    assert (values["dp"], values["tp"]) == ((2, 2) if not options else (4 // asked["--tp"], asked["--tp"]))
    assert values["max_rows"] == asked.get("--max-rows", GPU_ENGINE.max_rows)
    assert values["exchange"] == asked.get("--exchange", "gather")
    assert (values["page_size"], values["tile"], values["token_budget"]) == (64, 64, 8192)
    assert (values["num_pages"], values["memory_utilisation"]) == (None, 0.9)


def test_each_node_has_a_command_that_serve_takes():
    lines = mesh("plan", "Qwen3-235B-A22B", "--gpus", "2x8xH100", "--link", "ib400", "--command").stdout.splitlines()
    assert lines[0].startswith("# one a node; ")  # a comment in shells too
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    for process, line in enumerate(lines[1:]):
        _, name, *arguments = shlex.split(line)
        values = serve.make_context(name, arguments).params
        assert (values["dp"], values["tp"], values["processes"], values["process"]) == (4, 4, 2, process)
        for placeholder in (values["coordinator"], str(values["secret_file"])):
            assert placeholder in lines[0] and placeholder.split(":")[0].isupper()
    assert len(lines) == 3


def test_help_names_every_kind():
    text = "".join(mesh("plan", "--help").stdout.replace("│", " ").split())
    for kind in (*gpu_kinds(), *link_kinds()):
        assert kind in text


ERRORS = {
    "kind": (("plan", "Qwen3-30B-A3B", "--gpus", "4xV100"), "must be one of H100, H200, A100-80, B200, L40S"),
    "gpus": (("plan", "Qwen3-30B-A3B", "--gpus", "H100"), "must be a number and a kind, as in 4xH100"),
    "model": (("plan", "Qwen3-31B", "--gpus", "4xH100"), "known by name: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder"),
    "hub id": (
        ("plan", "Qwen/Qwen3-31B", "--gpus", "4xH100"),
        "or by hub id: Qwen/Qwen3-30B-A3B, Qwen/Qwen3-235B",
    ),
    "folder": (("plan", BASE.parent, "--gpus", "4xH100"), "holds no config.json"),
    "no link": (
        ("plan", "Qwen3-30B-A3B", "--gpus", "2x8xH100"),
        "--link: 2 nodes need a network between them, one of ib4",
    ),
    "link": (("plan", "Qwen3-30B-A3B", "--gpus", "2x8xH100", "--link", "ib800"), "--link ib800: must be one of ib400"),
    "link in a node": ((*PAPER, "--link", "ib400"), "--link ib400: --gpus is one node, which needs no network"),
    "crossing engine": (
        ("plan", "Qwen3-30B-A3B", "--gpus", "2x8xH100", "--link", "ib400", "--tp", 16),
        "no mesh of 2 nodes of 8 x H100 serves the model: every mesh breaks a rule, see above",
    ),
    "checked nodes": (
        ("check", "Qwen3-30B-A3B", "--gpus", "2x8xH100", "--dp", 1, "--tp", 16),
        "dp 1 x tp 16: tp = 16 must divide the 8 GPUs of a node",
    ),
    "shown nodes": (
        ("show", "Qwen3-30B-A3B", "--dp", 4, "--nodes", 3),
        "nodes = 3 must divide the 4 devices",
    ),
    "tp": ((*PAPER, "--tp", 3), "--tp 3: no mesh of 4 GPUs has it; dp * tp must be 4"),
    "dp and tp": ((*PAPER, "--dp", 2, "--tp", 4), "--dp 2 --tp 4: no mesh of 4 GPUs has it; dp * tp must be 4"),
    "length": ((*PAPER, "--max-model-len", 50_000), "--max-model-len 50000 is beyond the model's 40960 positions"),
    "whole nodes": (("plan", "Qwen3-30B-A3B", "--gpus", "12xH100"), "a node has 8 GPUs, which do not divide 12"),
    "nodes without a link": (("plan", "Qwen3-30B-A3B", "--gpus", "16xH100"), "--link: 2 nodes need a network"),
    "long request": ((*PAPER, "--request-tokens", 50_000), "50000 is beyond the model's 40960"),
    "output": ((*PAPER, "--output-tokens", 2000), "request_tokens must be above output_tokens = 2000"),
    "budget": ((*PAPER, "--token-budget", 64), "token_budget must be at least max_rows and tile (128), not 64"),
    "count": (("plan", "Qwen3-30B-A3B", "--gpus", "3xH100"), "every mesh breaks a rule, see above; the fewest that"),
    "memory": (("plan", "Qwen3-235B-A22B", "--gpus", "4xH100"), "per GPU are missing; the fewest that would is 8"),
    "no command": (("plan", "Qwen3-235B-A22B", "--gpus", "4xH100", "--command"), "the fewest that would is 8"),
    "checked mesh": (("check", "Qwen3-30B-A3B", "--gpus", "4xH100", "--dp", 2), "--dp 2 x --tp 1 is 2 devices"),
    "checked rule": (
        ("check", "Qwen3-30B-A3B", "--gpus", "6xH100", "--dp", 3, "--tp", 2),
        "dp 3 x tp 2: num_experts = 128 must be divisible by dp * tp = 6",
    ),
    "shown mesh": (("show", "Qwen3-30B-A3B", "--dp", 3), "num_experts = 128 must be divisible by dp * tp = 3"),
    "layer": (("show", "Qwen3-30B-A3B", "--layer", 48), "--layer 48: must be from 0 to 47"),
    "placement": (
        ("show", "Qwen3-30B-A3B", "--placement-file", "{placement}"),
        "the placement must be for 48 layers of 128 experts on 1 ranks, not 3 layers of 8 experts on 2 ranks",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_end_with_their_reason_and_exit_code_2(tmp_path, arguments, message):
    save_placement(tmp_path / "placement.npz", np.tile(np.arange(8), (3, 1)), {"ranks": 2})
    result = mesh(*(str(a).replace("{placement}", str(tmp_path / "placement.npz")) for a in arguments))
    assert result.exit_code == 2
    (last,) = result.stderr.splitlines()
    assert last.startswith("error: ") and message in last


def test_json_of_what_does_not_fit_says_why():
    result = mesh("plan", "Qwen3-235B-A22B", "--gpus", "4xH100", "--json")
    found = json.loads(result.stdout)
    assert (found["plans"], found["recommended"]) == ([], None)
    assert [refused["missing_bytes"] > 4e10 for refused in found["rejected"]] == [True] * 3


def test_show_lists_and_draws(tmp_path):
    slots = np.tile(np.arange(8), (3, 1))
    slots[1] = [1, 0, 2, 3, 4, 5, 7, 6]
    slots[2] = [4, 1, 2, 3, 0, 5, 6, 7]
    save_placement(tmp_path / "placement.npz", slots, {"ranks": 4})
    picture = tmp_path / "[a] mesh.png"
    options = ("--dp", 2, "--tp", 2, "--placement-file", tmp_path / "placement.npz", "--layer", 2, "--picture", picture)
    result = mesh("show", BASE, *options)
    assert result.exit_code == 0, result.output
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row[-1].strip() for row in rows] == ["1, 4", "2-3", "0, 5", "6-7"]
    assert [row[1].strip() for row in rows] == ["0", "0", "1", "1"]
    assert result.stderr.strip() == f"wrote {picture}"
    assert matplotlib.image.imread(picture).std() > 0.05


@pytest.mark.parametrize("command", ["plan", "show"])
def test_help_says_what_every_option_does(command):
    text = mesh(command, "--help").stdout
    group = typer.main.get_command(app).commands["mesh"]  # type: ignore[attr-defined]
    for parameter in group.commands[command].params:
        assert parameter.help
        if parameter.param_type_name == "option":
            assert parameter.opts[0] in text
