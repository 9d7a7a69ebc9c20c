"""Training on several ranks: processes that `torchrun` starts, on one machine or on many."""
