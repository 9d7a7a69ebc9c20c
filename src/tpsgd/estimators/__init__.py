"""Nets in scikit-learn's conventions: `TPSGDClassifier`, and what it adds to `fit`."""

from importlib.util import find_spec

if find_spec("sklearn") is None:
    raise ImportError("tpsgd.TPSGDClassifier needs scikit-learn: pip install scikit-learn")
