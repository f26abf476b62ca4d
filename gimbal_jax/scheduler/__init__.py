"""Every scheduling decision, as pure functions of frozen snapshots. Only numpy and the configuration are needed.

- Dispatch, which engine gets a request: ``dispatch`` (Gimbal's rule), ``dispatch_peers`` (the rules of other servers),
  ``dispatch_decision`` (input and output of a rule), ``dispatcher`` (the memory between decisions), ``trace``.
- Queues, which request runs first: ``queue``, and ``late`` (late binding of requests to engines).
- Placement, which rank holds each expert: ``placement`` (from traffic to a proposal), ``objective``, ``distance``,
  ``greedy``, ``refined``, ``eplb``, ``exact`` (offline, needs scipy), ``relabel``, ``assignment``, ``migration``.
- Traffic: ``traffic`` (statistics of counts), ``counts_file``, ``windows`` (synthetic traffic).
- ``baselines``: offline placements of other papers.
"""
