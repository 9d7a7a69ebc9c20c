"""scikit-learn's own checks of an estimator."""

import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator

QUICK = (  # in make test; the others in make test-all
    *("check_dict_unchanged", "check_estimator_cloneable", "check_estimators_nan_inf"),
    *("check_fit2d_predict1d", "check_methods_subset_invariance", "check_n_features_in"),
    *("check_estimators_pickle", "check_no_attributes_set_in_init"),
)


def scikit_learns_checks(estimator) -> list:
    """The checks for this kind of estimator, as parameters of a test."""
    checks = [check for _, check in estimator_checks_generator(estimator)]
    names = [getattr(check, "func", check).__name__ for check in checks]
    return [
        pytest.param(check, id=name, marks=[pytest.mark.full] * (name not in QUICK))
        for check, name in zip(checks, names, strict=True)
    ]
