"""The version of the package, where modules can read it without the public names of ``gimbal_jax``."""

__version__ = "0.1.0"
