"""Planning a mesh before renting one: what fits, what it costs, and the step compiled for GPUs that are not there."""
