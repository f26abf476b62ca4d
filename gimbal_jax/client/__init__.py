"""The Python client: an asyncio connection to a server.

- client: ``GimbalClient``, its calls
- options: the sampling options of ``generate``, and the request that is made of them
- chunks: chunks with text from the server's messages
- records: what the client returns, and the errors that it raises
- channel: the gRPC channel with TLS and API key
"""
