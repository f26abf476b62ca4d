"""`gimbal mesh show` as a script."""

import typer

from gimbal_jax.cli.mesh import show

if __name__ == "__main__":
    typer.run(show)
