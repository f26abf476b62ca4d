"""The devices of one process, in jax: the model on a mesh, compiled, and the commands that keep processes in step.

- device_runner: ``DeviceRunner``, which implements ``Runner`` on a mesh
- batch: plans to the arrays of a step, and its outputs back to results
- commands: commands of the leading process to its followers, and their bytes
- programs: compiled programs, kept in a folder for the next start
- environment: versions and source files that compiled programs depend on
- kv_pool: the number of KV pages that the devices have memory for
- devices: jax's devices as the user names them, and weights on a mesh
- host_memory: memory of the process, and large pages
- profiler: traces by jax's profiler
"""
