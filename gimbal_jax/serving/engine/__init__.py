"""The host side of one data-parallel engine: which sequences run in a step, and which KV pages they use. No jax.

- engine: ``Engine``, which schedules steps and commits their results
- running_batch: ``RunningBatch``, the running sequences as arrays by row
- queue: ``WaitQueue``, the waiting sequences in the order in which they run
- sequence: ``Sequence``, one request with its state
- pages: ``PagePool``, the users and the content of KV pages
- prefix: names for the content of pages, so that sequences share a prefix
- request: requests, sampling parameters and ``TokenDelta``, from and to the frontend
- plan: ``Plan`` and ``StepResult``, to and from the runner
- runner: the ``Runner`` protocol, which devices and the simulator implement
- limits, meters, status: limits of a sequence, histograms and phase times, snapshots
"""
