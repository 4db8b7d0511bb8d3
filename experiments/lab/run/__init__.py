"""Runs: their folders, records and checkpoints."""
