"""Trained models and checkpoints in folders: tensors as safetensors, all else as JSON, no code."""
