"""Rules side by side, and the report."""
