"""The secret of several processes. Their TLS is tested in ``tests/serving/network/test_certificates.py``."""

import pytest

from gimbal_jax.cli.serve.group import command_tls, read_secret
from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.serve.processes import Processes


@pytest.mark.parametrize(("mode", "warnings"), [(0o600, 0), (0o640, 0), (0o644, 1)])
def test_a_secret_is_stripped_and_one_that_every_user_can_read_gives_a_warning(tmp_path, capsys, mode, warnings):
    path = tmp_path / "secret"
    path.write_text("\n 0123456789abcdef \n")
    path.chmod(mode)
    assert read_secret(path) == b"0123456789abcdef"
    warning = f"secret_file {path}: every user of this host can read it (chmod 600)\n"
    assert capsys.readouterr().err == warning * warnings


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        (b"0123456789abcde\n", "has 15 characters, must have at least 16"),
        (b"\xff" * 20, "must be plain ASCII"),
    ],
)
def test_a_bad_secret_is_rejected_with_its_field_and_not_shown(tmp_path, content, problem):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"secret_file .*secret: {problem}") as error:
        read_secret(path)
    assert "0123" not in str(error.value)


def test_the_leader_needs_the_key_of_its_certificate(tmp_path):
    options = ServeOptions("m", command_cert=tmp_path / "cert")
    with pytest.raises(ValueError, match="--command-cert needs --command-key in process 0"):
        command_tls(Processes(2, 0, ("host", 1), 2), options)
    assert command_tls(Processes(2, 0, ("host", 1), 2), ServeOptions("m")) is None
