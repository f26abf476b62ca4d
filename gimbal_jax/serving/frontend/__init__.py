"""The asyncio side of the server: dispatches requests to engines and streams their tokens. It runs on one event loop.

- choices: a validated request, run as its n sequences
- frontend: ``Frontend``, which dispatches sequences and routes the core's news to their streams
- stream: ``Stream``, the deltas of one sequence that its consumer has not taken yet
- record: ``RequestRecord``, the facts of one sequence for logs, histograms and spans
- counters: counts since the start, and tokens per second
- prefix_index: the pages that the engines' prefix caches hold, and the log of their last changes
"""
