"""The ``gimbal`` command. It connects all other rooms, so only scripts and tests import it.

`main` has the command itself, with `demo-model`, `convert` and `counts`. Larger commands have modules of their own:
`serve` (a package), `bench`, `mesh`, `place` and `simulate`. `top` is the live view of a server in the terminal, and
`top_screen` draws one frame of it. `terminal` has the messages, progress, errors and tables of all commands.
"""
