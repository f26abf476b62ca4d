"""A placement policy for processes to import, which does not survive every window."""

import os
import signal

from gimbal_jax.scheduler.placement import propose


def dies_without_traffic(counts_LSE, *others):
    if not counts_LSE.any():
        os.kill(os.getpid(), signal.SIGKILL)
    return propose(counts_LSE, *others)
