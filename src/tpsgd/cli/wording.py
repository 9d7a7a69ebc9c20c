"""Messages of the library, which name arguments of Python functions, in words of the shell."""

import re

WORDS = {"True": "yes", "False": "no"}
OPTIONS = "batch_size|micro_batch|max_train|max_test|on_disk|held_out"


def in_options(message: str) -> str:
    """The message with options in place of Python arguments.

    Examples:
        >>> in_options("use order=tpsgd.simultaneous and a smaller batch_size")
        'use --order simultaneous and a smaller --batch-size'
        >>> in_options("set memory=tpsgd.Memory(reuse=False, micro_batch=...) instead")
        'set --reuse no, --micro-batch ... instead'
        >>> in_options("replace it with overwrite=True (--overwrite)")
        'replace it with --overwrite'
        >>> in_options("leave it out, drop=['id'] (--drop id)")
        'leave it out, --drop id'
    """
    value = r"=(?:\w+|'[^']*'|\[[^\]]*\]|\.{3})"
    message = re.sub(rf"[\w.]+(?:{value}|\([^()]*\)) \((--[\w-]+[^()]*)\)", r"\1", message)
    message = re.sub(r"\bmemory=(?:tpsgd\.)?Memory\(([^)]*)\)", r"\1", message)
    values = r"\b(order|optimizer)=tpsgd\.(\w+)(?:\(\))?"
    message = re.sub(values, lambda m: f"--{m[1]} {m[2].replace('_', '-')}", message)
    message = re.sub(r"\breuse=(\w+)", lambda m: f"--reuse {WORDS.get(m[1], m[1])}", message)
    named = rf"(?<![\w-])({OPTIONS})\b(=?)"
    return re.sub(named, lambda m: f"--{m[1].replace('_', '-')}{' ' * len(m[2])}", message)
