"""Bytes: planned before training, kept under a limit, measured during it."""
