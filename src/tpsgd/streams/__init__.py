"""Learning from a stream: a model that goes on learning, samples kept for rehearsal, new classes.

    stream       `Stream`: `partial_fit` on a few samples at a time
    online       a net whose learners live on from batch to batch
    new_classes  one more output, one more row of class codes; everything else stays
    labels       the names of classes, and which are new
    rehearsal    `Rehearsal`: earlier samples, bounded in bytes
    subjects     what can learn from a stream: a model, or the layers of an adaptor
"""
