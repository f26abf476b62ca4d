"""`gimbal mesh plan` as a script."""

import typer

from gimbal_jax.cli.mesh import plan

if __name__ == "__main__":
    typer.run(plan)
