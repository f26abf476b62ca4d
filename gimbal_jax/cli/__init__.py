"""The ``gimbal`` command. It puts all rooms together, so nothing imports it except scripts and tests.

- main: the command itself, with ``demo-model``, ``convert`` and ``counts``
- serve: ``gimbal serve``, a package of its own
- bench, mesh, place, simulate: the commands of these names
- top, top_screen: ``gimbal top``, and one frame of it
- terminal: messages, progress, errors and tables of all commands
"""
