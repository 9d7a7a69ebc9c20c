"""Learning from a stream: a model that goes on learning, samples to rehearse, new classes."""
