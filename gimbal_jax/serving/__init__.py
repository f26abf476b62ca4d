"""The server, as rooms. Each room imports only rooms above it in this list (tests/test_imports.py).

- network: API keys, TLS, ports
- engine: one engine, with its queue, sequences, KV pages and plans
- text: tokenizer, stop strings, structured output
- placement: count traffic, decide, move experts
- core: the tick over all engines, and its thread
- runtime: the devices; the only room here that imports jax
- cluster: several processes as one server
- gateway: OpenAI's HTTP API
- frontend: dispatch, streams, records of requests
- monitoring: metrics, operators' HTTP, live view, log, spans
- rpc: the gRPC services
"""
