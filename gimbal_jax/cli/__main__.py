"""``python -m gimbal_jax.cli``: the ``gimbal`` command."""

from gimbal_jax.cli.main import app

app()
