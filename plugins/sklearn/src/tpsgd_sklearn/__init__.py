"""Nets in scikit-learn's conventions: `TPSGDClassifier` and `TPSGDRegressor`."""

from importlib.util import find_spec

if find_spec("sklearn") is None:
    raise ImportError(
        "tpsgd's classifier and regressor need scikit-learn: pip install scikit-learn"
    )
