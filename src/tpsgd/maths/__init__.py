"""Tensor functions of the paper's files. Imports nothing but torch and those files."""
