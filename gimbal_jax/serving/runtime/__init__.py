"""Devices: the runner, its batches, compiled programs and memory."""
