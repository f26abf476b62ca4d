"""Offline baselines of placement: they need a profile, or slots, that the server does not have.

- ``moetuner``: MoETuner's placement from the transitions of experts between layers.
- ``sem_moe``: Sem-MoE's co-scheduling of requests and experts, as an oracle that knows the routing.
- ``redundant_experts``: EPLB with several slots for hot experts.
"""
