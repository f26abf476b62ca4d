"""TLS of the gRPC server: what is wrong with its files is said at the start, not at the first handshake."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

import grpc

from gimbal_jax.config import NetworkConfig
from gimbal_jax.serving.api_keys import read_text


def server_credentials(network: NetworkConfig) -> grpc.ServerCredentials | None:
    """What the server serves TLS with; None where it has no certificate.

    With ``tls_client_ca`` clients must show a certificate of these authorities. Raises ValueError that
    names the field: a file is missing or no PEM, key and certificate do not belong together, the
    certificate is out of date or not for servers.
    """
    cert, key, client_ca = network.tls_cert, network.tls_key, network.tls_client_ca
    if cert is None and key is None:
        if client_ca is not None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return None
    if cert is None or key is None:
        raise ValueError("tls_cert and tls_key must be given together")
    chain = _certificates("tls_cert", cert)
    authorities = None if client_ca is None else _certificates("tls_client_ca", client_ca)
    secret = read_text("tls_key", key).encode()
    _check_pair(cert, key)
    return grpc.ssl_server_credentials([(secret, chain)], authorities, client_ca is not None)


def _certificates(field: str, path: Path) -> bytes:
    try:
        data = path.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"{field} {path}: holds no certificate in PEM form") from error
    except OSError as error:
        raise ValueError(f"{field} {path}: {error.strerror}") from error
    return data


def _check_pair(cert: Path, key: Path) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def password() -> str:  # without this the library would ask at the terminal
        raise ValueError(f"tls_key {key}: is encrypted; give it without a password")

    try:
        server.load_cert_chain(cert, key, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"tls_key {key}: is not the key of tls_cert {cert}") from error
        raise ValueError(f"tls_key {key}: holds no private key in PEM form") from error
    try:
        _shake_hands(server, cert)
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"tls_cert {cert}: clients will refuse it: {error.verify_message}") from error


def _shake_hands(server: ssl.SSLContext, cert: Path) -> None:
    """A client that trusts just this certificate greets the server, in memory; raises where it is no good."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for end in (*ends, *ends):  # each says twice what it has to say
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
