"""``check``, the check of one GPU, and its parts."""
