"""Words in, library calls out."""
