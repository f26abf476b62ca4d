"""TLS and mutual TLS over real sockets, with certificates made here by the openssl program."""

import asyncio
import dataclasses
import shutil
import socket
import subprocess
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from gimbal_jax.config import NetworkConfig
from gimbal_jax.serving.frontend.record import RequestRecord
from gimbal_jax.serving.network.tls import server_credentials
from gimbal_jax.serving.rpc import listen as network
from tests.serving.fake_server import FakeCore, running_server, until
from tests.serving.rpc.test_interceptors import bearer, outcome, request

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")
CODES = grpc.StatusCode
CA_CONFIG = """
[ca]
default_ca = own
[own]
database = index.txt
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = leaf
[any]
commonName = supplied
[leaf]
basicConstraints = CA:FALSE
subjectAltName = DNS:localhost, IP:127.0.0.1
"""


def openssl(folder, *words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)


class Authority:
    """An authority that signs certificates. Its files are NAME.pem and NAME.key in its folder."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        openssl(folder, "req", "-x509", *self._new(name), "-subj", f"/CN={name}", "-days", "9")

    def sign(self, name, start="20200101000000Z", end="20991231000000Z"):
        openssl(self.folder, "req", *self._new(name, "csr"), "-subj", f"/CN={name}")
        (self.folder / "ca.cnf").write_text(CA_CONFIG)
        (self.folder / "index.txt").write_text("")
        words = ("-config", "ca.cnf", "-cert", f"{self.name}.pem", "-keyfile", f"{self.name}.key", "-notext", "-batch")
        files = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-outdir", ".")
        openssl(self.folder, "ca", *words, *files, "-startdate", start, "-enddate", end)
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    @property
    def pem(self):
        return self.folder / f"{self.name}.pem"

    def _new(self, name, end="pem"):
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")
        return (*new_key, "-keyout", f"{name}.key", "-out", f"{name}.{end}")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("authority"), "ca")
    authority.sign("server")
    authority.sign("client")
    return authority


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Another authority, which the server does not trust."""
    stranger = Authority(tmp_path_factory.mktemp("stranger"), "ca")
    stranger.sign("client")
    return stranger


def tls_of(authority, **more):
    folder = authority.folder
    return NetworkConfig(port=0, tls_cert=folder / "server.pem", tls_key=folder / "server.key", **more)


def credentials(authority, client=None):
    """Return the credentials of a client that trusts ``authority``. ``client`` signed its own certificate."""
    own = [(client.folder / f"client.{end}").read_bytes() for end in ("key", "pem")] if client else (None, None)
    return grpc.ssl_channel_credentials(authority.pem.read_bytes(), *own)


def run(test, config, core=None, **options):
    async def limited():
        async with asyncio.timeout(120), running_server(core, network=config, **options) as (_, port, *_):
            await test(port)

    core = core or FakeCore()
    with core:
        asyncio.run(limited())


async def call_with(channel, metadata=None):
    """Return the outcome of a unary and a streaming call, which must be equal and come within 5 s."""
    stub = pb_grpc.VllmEngineStub(channel)
    async with channel, asyncio.timeout(120):
        unary = await outcome(stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata))
        stream = await outcome(stub.Generate(request(), metadata=metadata))
    assert unary == stream
    return unary


def test_server_serves_only_clients_that_trust_its_authority(authority, stranger):
    async def test(port):
        good = grpc.aio.secure_channel(f"localhost:{port}", credentials(authority))
        assert await call_with(good) == (CODES.OK, "")
        other = grpc.aio.secure_channel(f"localhost:{port}", credentials(stranger))
        assert (await call_with(other))[0] is CODES.UNAVAILABLE
        plain = grpc.aio.insecure_channel(f"localhost:{port}")
        assert (await call_with(plain))[0] is CODES.UNAVAILABLE
        again = grpc.aio.secure_channel(f"localhost:{port}", credentials(authority))
        assert await call_with(again) == (CODES.OK, "")

    run(test, tls_of(authority))


def test_tls_client_on_a_plain_port_fails_immediately(authority):
    async def test(port):
        channel = grpc.aio.secure_channel(f"localhost:{port}", credentials(authority))
        assert (await call_with(channel))[0] is CODES.UNAVAILABLE

    run(test, NetworkConfig(port=0))


def test_self_signed_certificate_serves_clients_that_trust_it(tmp_path):
    server = Authority(tmp_path, "server")
    own = ("-key", "server.key", "-out", "server.pem", "-subj", "/CN=me", "-addext", "subjectAltName=DNS:localhost")
    openssl(tmp_path, "req", "-x509", *own)

    async def test(port):
        channel = grpc.aio.secure_channel(f"localhost:{port}", credentials(server))
        assert await call_with(channel) == (CODES.OK, "")

    run(test, tls_of(server))


def test_mutual_tls_requires_a_certificate_of_its_authority(authority, stranger):
    records: list[RequestRecord] = []

    async def test(port):
        for client, code in [(None, CODES.UNAVAILABLE), (stranger, CODES.UNAVAILABLE), (authority, CODES.OK)]:
            channel = grpc.aio.secure_channel(f"localhost:{port}", credentials(authority, client))
            assert (await call_with(channel))[0] is code

    run(test, tls_of(authority, tls_client_ca=authority.pem), observers=[records.append])
    assert [record.origin.client for record in records] == ["client"]  # the certificate's common name


def test_stream_limit_counts_by_certificate_name(authority):
    core = FakeCore(paused=True)

    async def test(port):
        channel = grpc.aio.secure_channel(f"localhost:{port}", credentials(authority, authority))
        stub = pb_grpc.VllmEngineStub(channel)
        live = asyncio.create_task(outcome(stub.Generate(request())))
        await until(lambda: core.live)
        assert (await outcome(stub.Generate(request())))[1].startswith("client has 1 requests already")
        core.paused = False
        assert await live == (CODES.OK, "")
        await channel.close()

    run(test, tls_of(authority, tls_client_ca=authority.pem, max_streams_per_client=1), core)


def test_keys_are_checked_over_tls(authority, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("right-key-0123456789 alice")
    keys.chmod(0o600)

    async def test(port):
        for key, code in [("right-key-0123456789", CODES.OK), ("wrong-key-0123456789", CODES.UNAUTHENTICATED)]:
            channel = grpc.aio.secure_channel(f"localhost:{port}", credentials(authority))
            assert (await call_with(channel, bearer(key)))[0] is code

    run(test, tls_of(authority, api_keys=keys))


def test_half_open_connections_do_not_block_others_and_are_closed(authority, monkeypatch):
    monkeypatch.setattr(network, "HANDSHAKE_S", 2.0)

    async def test(port):
        silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(20)]
        silent[0].sendall(b"\x16\x03\x01\x02\x00\x01")  # the start of a TLS handshake only
        channel = grpc.aio.secure_channel(f"localhost:{port}", credentials(authority))
        assert await call_with(channel) == (CODES.OK, "")
        for connection in silent:
            with connection:
                assert await asyncio.to_thread(connection.recv, 1) in (
                    b"",
                    b"\x15",
                )  # closed, or alert

    run(test, tls_of(authority))


@pytest.mark.parametrize("which", ["tls_cert", "tls_key", "tls_client_ca"])
@pytest.mark.parametrize("content", [None, "no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_missing_or_broken_file_error_names_the_file(authority, tmp_path, which, content):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"{which} .*file: " + ("No such file" if content is None else "contains no")):
        server_credentials(dataclasses.replace(tls_of(authority, tls_client_ca=authority.pem), **{which: path}))


@pytest.mark.parametrize(
    "fields, complaint",
    [
        ({"tls_cert": "server.pem"}, "must be given together"),
        ({"tls_key": "server.key"}, "must be given together"),
        ({"tls_client_ca": "ca.pem"}, "tls_client_ca needs tls_cert"),
        ({"tls_cert": "server.pem", "tls_key": "client.key"}, "client.key: is not the key of tls_cert .*server.pem"),
        ({"tls_cert": "server.key", "tls_key": "server.key"}, "tls_cert .*server.key: contains no certificate"),
        ({"tls_cert": "server.pem", "tls_key": "server.pem"}, "tls_key .*server.pem: contains no private key"),
    ],
)
def test_files_that_do_not_belong_together_are_rejected(authority, fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        server_credentials(NetworkConfig(**{name: authority.folder / file for name, file in fields.items()}))


def test_encrypted_key_is_rejected_without_a_password_prompt(authority, tmp_path):
    encrypted = tmp_path / "encrypted.key"
    openssl(authority.folder, "pkey", "-in", "server.key", "-aes256", "-passout", "pass:secret", "-out", encrypted)
    with pytest.raises(ValueError, match=r"encrypted\.key: is encrypted"):
        server_credentials(NetworkConfig(tls_cert=authority.folder / "server.pem", tls_key=encrypted))


@pytest.mark.parametrize(
    "dates, complaint",
    [
        (("20200101000000Z", "20200201000000Z"), "certificate has expired"),
        (("20900101000000Z", "20910101000000Z"), "certificate is not yet valid"),
    ],
)
def test_certificate_out_of_date_is_rejected(authority, dates, complaint):
    cert, key = authority.sign("old", *dates)
    with pytest.raises(ValueError, match=f"tls_cert .*old.pem: clients will reject it: {complaint}"):
        server_credentials(NetworkConfig(tls_cert=cert, tls_key=key))


def test_chain_with_its_authority_is_accepted(authority, tmp_path):
    chain = tmp_path / "chain.pem"
    chain.write_bytes((authority.folder / "server.pem").read_bytes() + authority.pem.read_bytes())
    assert server_credentials(NetworkConfig(tls_cert=chain, tls_key=authority.folder / "server.key")) is not None
