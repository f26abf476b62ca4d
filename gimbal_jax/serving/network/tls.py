"""TLS of the gRPC server. Certificates and keys are checked at the start instead of at the first handshake."""

from __future__ import annotations

import contextlib
import re
import ssl
from pathlib import Path

import grpc

from gimbal_jax.config import NetworkConfig
from gimbal_jax.serving.network.api_keys import read_text


def server_credentials(network: NetworkConfig) -> grpc.ServerCredentials | None:
    """Return the TLS credentials of the server, None if no certificate is configured.

    With ``tls_client_ca``, clients must present a certificate of these authorities. Raises ValueError that
    names the field if a file is missing or not in PEM form, if key and certificate do not belong together,
    or if the certificate is out of date or not for servers.
    """
    cert, key, client_ca = network.tls_cert, network.tls_key, network.tls_client_ca
    if cert is None and key is None:
        if client_ca is not None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        return None
    if cert is None or key is None:
        raise ValueError("tls_cert and tls_key must be given together")
    chain = read_certificates("tls_cert", cert)
    authorities = None if client_ca is None else read_certificates("tls_client_ca", client_ca)
    secret = read_text("tls_key", key).encode()
    server_context("tls_cert", cert, "tls_key", key)  # raises ValueError if the pair is bad
    return grpc.ssl_server_credentials([(secret, chain)], authorities, client_ca is not None)


def read_certificates(field: str, path: Path) -> bytes:
    """Return the PEM of a file of certificates. Raises ValueError that names ``field``."""
    try:
        data = path.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"{field} {path}: contains no certificate in PEM form") from error
    except OSError as error:
        raise ValueError(f"{field} {path}: {error.strerror}") from error
    return data


def server_context(cert_field: str, cert: Path, key_field: str, key: Path) -> ssl.SSLContext:
    """Return the TLS context of a server, after a test handshake. Raises ValueError that names a field."""
    read_certificates(cert_field, cert)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def password() -> str:  # without this the library would ask for a password at the terminal
        raise ValueError(f"{key_field} {key}: is encrypted; give a key without a password")

    try:
        server.load_cert_chain(cert, key, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{key_field} {key}: is not the key of {cert_field} {cert}") from error
        raise ValueError(f"{key_field} {key}: contains no private key in PEM form") from error
    except OSError as error:
        raise ValueError(f"{key_field} {key}: {error.strerror}") from error
    try:
        _shake_hands(server, pinned_context(cert_field, cert))
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"{cert_field} {cert}: clients will reject it: {error.verify_message}") from error
    return server


def pinned_context(field: str, cert: Path) -> ssl.SSLContext:
    """Return the TLS context of a client that trusts only the first certificate of the file, under any host name.

    The client trusts no authority. Raises ValueError that names ``field``.
    """
    first = re.search(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", read_certificates(field, cert), re.S)
    if first is None:
        raise ValueError(f"{field} {cert}: contains no certificate in PEM form")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=first[0].decode("ascii"))
    return client


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Do a handshake in memory. Raises ssl.SSLCertVerificationError if the client rejects the certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for end in (*ends, *ends):  # a handshake takes two turns of each side
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
