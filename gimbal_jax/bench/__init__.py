"""Load on a running server, and the measurements of its clients. The room runs without jax.

A benchmark is a series of rounds, each a set of requests that are sent when they are due. `gimbal bench` uses it.
`load` makes the requests of a round: lengths, arrivals and prompts. `replay` sends them when they are due, and reads
request traces. `clients` has the transports: gRPC, and OpenAI's HTTP API. `rounds` runs the rounds and chooses their
rate. `measurement` has the observations of a client and their summary. `report` makes tables and JSON of the results.
`server_process` runs `gimbal serve` as a child process.
"""
