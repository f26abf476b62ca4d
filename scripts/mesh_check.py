"""`gimbal mesh check` as a script."""

import typer

from gimbal_jax.cli.mesh import check

if __name__ == "__main__":
    typer.run(check)
