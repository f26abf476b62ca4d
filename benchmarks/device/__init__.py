"""The parts of ``benchmarks/device/check.py``: what is checked on one GPU, and how."""
