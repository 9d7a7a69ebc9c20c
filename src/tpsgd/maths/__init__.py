"""Helpers of the paper's equations."""
