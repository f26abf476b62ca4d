"""Planning before serving: meshes that fit, their costs, programs compiled without a GPU, and placements.

Meshes by arithmetic:

- models: models that a mesh can be planned for
- hardware: facts of GPUs and networks, from gpus.toml and links.toml
- cost: floors of step times, and bytes over links
- plan: every mesh of some GPUs, and the recommended one; plan_report: plans as tables and JSON
- show, picture: which device holds what, as text and as a picture

Meshes by compiling:

- target: devices to compile for that are not there
- compiled: the server's programs compiled for them; hlo and kernels read the result
- rules: rules that a compiled program must keep; check: all programs of a mesh, checked

Placements:

- placements: placement policies compared on counted traffic
"""
