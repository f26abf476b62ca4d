"""The server on simulated H100s under virtual time: the real engines, dispatch, queues and placement, without jax.

A run:

- scenario: one run in one record; systems: the systems that are compared
- workload: requests with their times, lengths and topics; routing: synthetic and recorded routers
- simulate: the run, from the first arrival to the last token; clock: virtual time
- runner: the devices, simulated; work: what a step computes
- profile: placements of offline systems before a run; results: a run as JSON

Prices:

- cost_sets: the assumptions of each cost set
- costs: steps, migrations and decisions
- kernel_table: measured kernel times; expert_kernel: an expert product in fitted parts
- links: exchange, collectives and moves
- shapes: how prices carry over to other models
"""
