"""``gimbal serve``: from options to a served model. The only place where all parts of a server meet.

- options: every option in one record, whose fields are flags and keys
- policy_tables: the tables [dispatch], [queue] and [placement] of the configuration file
- toml_file: options from flags and from a configuration file
- command: the command, from its options to a server that has drained
- setup: devices, weights and compiled programs, the same in every process
- group: several processes: the leader gathers the followers, and they execute its commands
- processes: the index of this process, and jax.distributed between all of them
"""
