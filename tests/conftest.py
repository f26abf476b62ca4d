"""Four virtual CPU devices for every test, and no deadlines: the machine may be busy."""

import hypothesis
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

hypothesis.settings.register_profile("gimbal", deadline=None)
hypothesis.settings.load_profile("gimbal")
