"""What learns: a model cut into blocks, and each layer kind's gradients."""
