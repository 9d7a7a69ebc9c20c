"""The machine of a record that grew in several runs."""

from typing import Any

from tpsgd.comparison.provenance import machine


def machines(before: dict[str, Any]) -> dict[str, Any]:
    """This machine; its processor is named behind those that measured what the record has already.

    Examples:
        >>> machines({"machine": {"cpu": "abacus"}})["cpu"].startswith("abacus and ")
        True
    """
    here = machine()
    earlier = before.get("machine", {}).get("cpu", "").split(" and ")
    names = [name for name in earlier if name and name != here["cpu"]]
    return here | {"cpu": " and ".join([*names, here["cpu"]])}
