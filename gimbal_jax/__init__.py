"""An MoE LLM server in JAX whose three decisions work as one loop.

Which engine gets a request, which request an engine runs first, and which device
holds each expert: ``gimbal_jax.scheduler`` decides, ``gimbal_jax.model`` computes,
``gimbal_jax.serving`` runs them as a server.
"""

__version__ = "0.1.0"
