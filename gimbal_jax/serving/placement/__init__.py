"""The placement loop: count expert traffic, decide on a placement, move experts between steps.

``traffic``: expert tokens, from the counters on the devices to totals and expert pressure.
``rebalance``: the loop itself, a state machine on the engine thread.
``decision``: one decision, from a window and the current placement to rounds of moves. It loads no jax.
``process``, ``child``: the executor that runs decisions in a child process, and the program of that process.
``records``: windows, decisions, totals and the loop's status, for clients, metrics and files.
``files``: windows and the current placement as files.
"""
