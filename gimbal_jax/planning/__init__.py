"""Planning before serving: meshes that fit, their costs, programs compiled without a GPU, and placements."""
