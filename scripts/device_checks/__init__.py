"""The parts of ``scripts/device_check.py``: what is checked on one GPU, and how."""
