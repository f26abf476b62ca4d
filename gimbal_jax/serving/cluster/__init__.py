"""Several processes as one server: ``channel`` carries the leader's commands to the followers over one ``connection``
each, and ``agreement`` lists what all processes must have in common."""
