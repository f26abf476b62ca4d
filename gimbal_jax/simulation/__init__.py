"""The server on simulated H100s under virtual time: real engines, dispatch, queues and placement, without jax.

A run: `scenario` has all inputs of a run, and `systems` the systems that are compared. `workload` makes requests with
times, lengths and topics. `routing` has synthetic and recorded routers. `simulate` runs from the first arrival to the
last token, on the virtual time of `clock`. `runner` simulates the devices, and `work` describes what a step computes.
`profile` places experts for offline systems before a run. `results` turns a run into a JSON record.

Prices: `cost_sets` has the assumptions of each cost set. `costs` prices steps, migrations and decisions, from the
measured kernel times of `kernel_table`. `expert_kernel` splits an expert product into fitted parts, `links` prices
exchange, collectives and moves, and `shapes` scales prices to other models.
"""
