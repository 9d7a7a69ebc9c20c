"""A field of a rule by its name: an argument of its function, or else one of the dataclasses.

These are `Rule` and, where it is a dataclass, the objective.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from inspect import Parameter, signature
from typing import Any

from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.common.files import load_function
from tpsgd.engine.arm import Arm
from tpsgd.losses import ALL as LOSSES
from tpsgd.objectives import Place
from tpsgd.projections import binary, normal, orthogonal, per_filter, uniform
from tpsgd.rules import Rule

WORDS: dict[str, Mapping[str, Any]] = {  # that stand for values of a type
    "Place": {place.name.lower(): place for place in Place},
    "Projection": {f.__name__: f() for f in (normal, uniform, binary, orthogonal, per_filter)},
    "Loss": LOSSES,
}


def rule_of_file(word: str, **values: Any) -> Rule:
    """The rule that the function FILE.py:FUNCTION makes with these arguments."""
    rule = load_function(word)(**values)
    if not isinstance(rule, Rule):
        raise TpsgdError(f"{word} must return a tpsgd.Rule, got a {type(rule).__name__}")
    return rule


def with_fields(arm: Arm, values: Mapping[str, Any], make: Callable[..., Any] | None = None) -> Arm:
    """The arm of a rule with other fields; `make` is the function that makes the rule, if known.

    Examples:
        >>> from tpsgd import rules
        >>> with_fields(Arm("a", rules.readout()), {"features": 64, "scale": 3}).rule.options
        'normal codes, std 1, at most 64 features, calibrated, scale 3'
    """
    rule = arm.rule
    if rule is None:
        raise TpsgdError(f"{arm.name} does not learn by a rule: it has no fields")
    arguments = signature(make).parameters if make else {}
    free = any(each.kind is Parameter.VAR_KEYWORD for each in arguments.values())
    names = {*values} if free else {*arguments}
    chosen = {
        name: in_words(name, value, arguments[name].annotation if name in arguments else "")
        for name, value in values.items()
        if name in names
    }
    if make is not None and chosen:
        try:
            rule = make(**chosen)
        except (TypeError, ValueError, AttributeError) as error:
            raise TpsgdError(f"{arm.name} does not take {chosen}: {error}") from error
    if isinstance(rule, Arm):  # of a closed form, with its solver
        arm, rule = rule, rule.rule
    assert rule is not None
    for name in values.keys() - names:
        rule = _replaced(rule, name, values[name], names)
    return replace(arm, rule=rule)


def in_words(name: str, value: Any, kind: Any) -> Any:
    """A value; where a place, a projection or a loss belongs, a word stands for one of these."""
    values = next((words for type_, words in WORDS.items() if type_ in str(kind)), None)
    if values is None or not isinstance(value, str):
        return value
    if value not in values:
        raise TpsgdError(f"{name} must be one of {', '.join(values)}, got {value!r}")
    return values[value]


def _replaced(rule: Rule, name: str, value: Any, arguments: set[str]) -> Rule:
    """A rule with another field of its own or of its objective."""
    labels = {"name", "about", "options", "objective"}
    of_rule = {f.name: f.type for f in fields(rule) if f.name not in labels}
    objective: Any = rule.objective
    of_objective = set(getattr(objective, "__dataclass_fields__", ()))
    if name in of_rule:
        return replace(rule, **{name: in_words(name, value, of_rule[name])})
    if name not in of_objective:
        names = sorted({*of_rule, *of_objective, *arguments})
        raise TpsgdError(f"{rule.name} has no field {name!r}: {suggestion(name, names)}")
    objective = replace(objective, **{name: value})
    return replace(rule, objective=objective, options=str(objective))
