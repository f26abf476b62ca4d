"""Load on a running server, and what its clients measure. It runs without jax.

- load: the requests of a benchmark: lengths, arrivals, prompts
- replay: sends requests when they are due; reads request traces
- clients: how requests travel, by gRPC or by OpenAI's HTTP API
- rounds: the rounds of a benchmark and their rate
- measurement: what clients saw of their requests, and its summary
- report: tables and JSON
- server_process: ``gimbal serve`` as a child process
"""
