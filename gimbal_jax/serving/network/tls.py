"""TLS of the gRPC server."""

from __future__ import annotations

import contextlib
import re
import ssl
from pathlib import Path

import grpc

from gimbal_jax.config import NetworkConfig
from gimbal_jax.serving.network.api_keys import read_text


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
    chain = read_certificates("tls_cert", cert)
    authorities = None if client_ca is None else read_certificates("tls_client_ca", client_ca)
    secret = read_text("tls_key", key).encode()
    server_context("tls_cert", cert, "tls_key", key)  # raises what is wrong with the pair
    return grpc.ssl_server_credentials([(secret, chain)], authorities, client_ca is not None)


def read_certificates(field: str, path: Path) -> bytes:
    """PEM of a file of certificates; raises ValueError that names the field."""
    try:
        data = path.read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"{field} {path}: holds no certificate in PEM form") from error
    except OSError as error:
        raise ValueError(f"{field} {path}: {error.strerror}") from error
    return data


def server_context(cert_field: str, cert: Path, key_field: str, key: Path) -> ssl.SSLContext:
    """TLS of a server with this certificate, which a client has tried. Raises ValueError that names the field."""
    read_certificates(cert_field, cert)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def password() -> str:  # without this the library would ask at the terminal
        raise ValueError(f"{key_field} {key}: is encrypted; give it without a password")

    try:
        server.load_cert_chain(cert, key, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{key_field} {key}: is not the key of {cert_field} {cert}") from error
        raise ValueError(f"{key_field} {key}: holds no private key in PEM form") from error
    except OSError as error:
        raise ValueError(f"{key_field} {key}: {error.strerror}") from error
    try:
        _shake_hands(server, pinned_context(cert_field, cert))
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"{cert_field} {cert}: clients will refuse it: {error.verify_message}") from error
    return server


def pinned_context(field: str, cert: Path) -> ssl.SSLContext:
    """TLS of a client that trusts the first certificate of the file, whatever its name, and no authority.

    Raises ValueError that names the field.
    """
    first = re.search(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", read_certificates(field, cert), re.S)
    if first is None:
        raise ValueError(f"{field} {cert}: holds no certificate in PEM form")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=first[0].decode("ascii"))
    return client


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """The client greets the server, in memory; raises where it refuses the certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for end in (*ends, *ends):  # each says twice what it has to say
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
