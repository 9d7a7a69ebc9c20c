"""Trained models in files: tensors as safetensors, everything else as JSON, no code.

`tensors` reads and writes safetensors; `folder` is the pair of files, with their checksums, that
models, adaptors and checkpoints share; `modules` describes modules by type and constructor
arguments, from an allow-list; `trained` is what a folder has of a trained model, `scaling` how its
samples were scaled, `checkpoint` what a folder has of a run that goes on later; `expected` compares
the state in such a file with a fresh state. The package imports `nets` and what is below it:
`Run.save` calls it, and `tpsgd.load` in `training` reads what it wrote.
"""
