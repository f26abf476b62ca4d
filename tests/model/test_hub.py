"""A model is downloaded from the hub if it is neither a folder nor in the cache, and errors give a remedy."""

import hashlib
import json
import shutil
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gimbal_jax.model.hub import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "qwen3_moe"}',
    "model.safetensors": bytes(3 * 2**20),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "pytorch_model.bin": b"not this",
    "original/model.safetensors": b"nor this",
    "README.md": b"nor this",
}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}


@contextmanager
def hub(files=FILES, rejection=(404, "RepoNotFound"), broken=()):
    """Run a server with the hub's HTTP API for one model, ``org/model``. Yield its address and the requested paths."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            requests.append(self.path)
            path = self.path.split("?")[0]
            if path == "/api/models/org/model/revision/main" or path == f"/api/models/org/model/revision/{COMMIT}":
                self.answer(json.dumps({"id": "org/model", "sha": COMMIT, "siblings": []}).encode())
            elif path == f"/api/models/org/model/tree/{COMMIT}":
                entries = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in files.items()
                ]
                self.answer(json.dumps(entries).encode())
            elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
                if path in broken and self.command == "GET":
                    self.close_connection = True
                else:
                    self.answer(files[path.removeprefix(f"/org/model/resolve/{COMMIT}/")])
            elif path.startswith("/api/models/org/model/revision/"):
                self.answer(b"", 404, "RevisionNotFound")
            else:
                self.answer(b"", *rejection)

        def answer(self, content, status=200, error=None):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_takes_precedence_over_the_hub(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model", None, endpoint="http://127.0.0.1:1").samefile(tmp_path / "org" / "model")
    with pytest.raises(ValueError, match="org/model is a folder, which has no revision v1"):
        resolve_model("org/model", "v1")


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_only_the_needed_files_are_downloaded(tmp_path, revision):
    reports = []
    with hub() as (endpoint, requests):
        report = lambda done, total: reports.append((done, total))  # noqa: E731
        folder = resolve_model("org/model", revision, report, cache_dir=tmp_path, endpoint=endpoint)
    assert files_of(folder) == WANTED
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)
    assert not any("pytorch" in path or "README" in path for path in requests)
    assert reports[-1] == (3, 3) and reports == sorted(reports)


def test_a_downloaded_model_needs_no_network(tmp_path):
    with hub() as (endpoint, requests):
        first = resolve_model("org/model", None, cache_dir=tmp_path, endpoint=endpoint)
        requests.clear()
        assert resolve_model("org/model", None, cache_dir=tmp_path, endpoint=endpoint) == first
        assert not any("resolve" in path for path in requests)
    assert resolve_model("org/model", None, cache_dir=tmp_path, endpoint=endpoint) == first


@pytest.mark.parametrize("model", ["./nothing", "/no/such/folder", "a b", "org/model/x", "org//model", "o--o/m"])
def test_an_invalid_hub_id_is_rejected_without_a_request(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with hub() as (endpoint, requests), pytest.raises(ValueError, match="neither a folder nor a hub id"):
        resolve_model(model, None, cache_dir=tmp_path, endpoint=endpoint)
    assert requests == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, "RepoNotFound"), "nor a model of the hub; if it is private, sign in with `hf auth login`"),
        ((401, "RepoNotFound"), "nor a model of the hub; if it is private, sign in with `hf auth login`"),
        ((403, "GatedRepo"), "is gated: request access .* set HF_TOKEN"),
    ],
)
def test_an_inaccessible_model_gives_an_error_with_a_remedy(tmp_path, answer, message):
    with hub(rejection=answer) as (endpoint, _), pytest.raises(ValueError, match=message):
        resolve_model("org/other", None, cache_dir=tmp_path, endpoint=endpoint)


def test_an_unknown_revision_is_rejected(tmp_path):
    with hub() as (endpoint, _), pytest.raises(ValueError, match="org/model has no revision v9"):
        resolve_model("org/model", "v9", cache_dir=tmp_path, endpoint=endpoint)


def test_a_model_outside_the_cache_needs_a_network(tmp_path):
    with hub() as (endpoint, _):
        pass
    with pytest.raises(OSError, match="not a folder and not in the cache, and the hub cannot be reached"):
        resolve_model("org/model", None, cache_dir=tmp_path, endpoint=endpoint)


def test_a_broken_connection_raises_an_os_error(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the library retries with growing delays
    with (
        hub(broken=(f"/org/model/resolve/{COMMIT}/model.safetensors",)) as (endpoint, _),
        pytest.raises(OSError, match="org/model cannot be downloaded from the hub: "),
    ):
        resolve_model("org/model", None, cache_dir=tmp_path, endpoint=endpoint)


def test_a_repository_without_safetensors_is_rejected(tmp_path):
    with hub({"config.json": b"{}", "pytorch_model.bin": b""}) as (endpoint, _):
        with pytest.raises(ValueError, match="org/model has no safetensors"):
            resolve_model("org/model", None, cache_dir=tmp_path, endpoint=endpoint)
        assert not list(tmp_path.rglob("config.json"))


def test_too_little_disk_space_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 8, 2 * 2**20))
    with hub() as (endpoint, _):
        with pytest.raises(OSError, match=r"takes 3 MiB, and .* has 2 MiB free; set HF_HOME"):
            resolve_model("org/model", None, cache_dir=tmp_path / "not" / "yet", endpoint=endpoint)
        assert not list(tmp_path.rglob("*.safetensors"))
