"""``gimbal serve``: from options to a served model. All parts of a server are connected here, and only here.

`options` has every option in one record, whose fields are flags and keys. `policy_tables` has the tables [dispatch],
[queue] and [placement] of the configuration file, and `toml_file` reads options from flags and from this file.
`command` is the command, from its options to a server that has drained. `setup` prepares devices, weights and compiled
programs in every process. With several processes, `processes` gives each its index and connects jax.distributed, and
`group` lets the leader gather the followers, which execute its commands.
"""
