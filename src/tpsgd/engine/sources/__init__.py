"""Where batches come from: arrays, loaders, augmentation, the outputs of frozen blocks."""
