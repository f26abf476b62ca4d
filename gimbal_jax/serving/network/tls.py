"""TLS of the gRPC server."""

from __future__ import annotations

import grpc

from gimbal_jax.config import NetworkConfig
from gimbal_jax.serving.network.api_keys import read_text
from gimbal_jax.serving.network.certificates import read_certificates, server_context


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
