"""Which server certificates a pinned client accepts. test_tls has the tests of bad files."""

import contextlib
import shutil
import ssl

import pytest

from gimbal_jax.cli.serve.group import command_tls
from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.serve.processes import Processes
from gimbal_jax.serving.network.tls import pinned_context, server_context
from tests.serving.rpc.test_tls import Authority

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("authority"), "ca")
    for name in ("server", "sibling"):
        authority.sign(name)
    return authority


def files(authority, name):
    return authority.folder / f"{name}.pem", authority.folder / f"{name}.key"


def leader_tls(cert, key):
    return command_tls(Processes(2, 0, ("host", 1), 2), ServeOptions("m", command_cert=cert, command_key=key))


def follower_tls(cert):
    return command_tls(Processes(2, 1, ("host", 1), 2), ServeOptions("m", command_cert=cert))


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """Return the TLS version of a handshake. Raises if the client rejects the server's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for end in (*ends, *ends):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return ends[0].version()


def test_pinned_certificate_is_accepted_with_tls_1_3_only(authority):
    cert, key = files(authority, "server")
    assert handshake(leader_tls(cert, key), follower_tls(cert)) == "TLSv1.3"
    old = pinned_context("command_cert", cert)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        handshake(leader_tls(cert, key), old)


def test_other_certificate_of_the_same_authority_is_rejected(authority, tmp_path):
    chain = tmp_path / "chain.pem"
    chain.write_bytes(files(authority, "server")[0].read_bytes() + authority.pem.read_bytes())
    client = pinned_context("command_cert", chain)
    assert handshake(server_context("cert", chain, "key", files(authority, "server")[1]), client)
    cert, key = files(authority, "sibling")
    sibling = server_context("cert", cert, "key", key)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(sibling, client)


def test_errors_name_the_field(authority, tmp_path):
    cert, key = files(authority, "server")
    with pytest.raises(ValueError, match=r"command_cert .*none: No such file"):
        follower_tls(tmp_path / "none")
    with pytest.raises(ValueError, match=r"command_key .*none: No such file"):
        leader_tls(cert, tmp_path / "none")
    with pytest.raises(ValueError, match=r"command_key .*sibling\.key: is not the key of command_cert .*server\.pem"):
        leader_tls(cert, files(authority, "sibling")[1])
    with pytest.raises(ValueError, match=r"command_cert .*server\.key: contains no certificate"):
        leader_tls(key, key)
