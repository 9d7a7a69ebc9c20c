"""A Flower app: an MLP on MNIST, or an adaptor on VGG16's features, learned by a fleet."""
