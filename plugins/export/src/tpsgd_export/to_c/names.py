"""The name of a net: the prefix of its functions, types, macros, header guards and files.

The frames and kernels are written for a net called `net`, whose kernels are `tps_`. For another
name they are rendered at the end: two nets then link into one program, and none of their names
can be somebody else's.
"""

import re
from collections.abc import Iterable, Mapping

from tpsgd.common.errors import TpsgdError

USUAL = "net"
LONGEST = 31  # characters that every linker tells apart
OWN = re.compile(r"\b(net|tps|NET|TPS|TPSGD(?=_H\b))_(?=\w)|\b(net|tpsgd)(?=\.[ch]\b)")
KERNELS = re.compile(r"(?:(\w+)_)?tpsgd\.h")
HEADERS = (  # of C, which a file of the same name would hide from programs around it
    *("assert", "complex", "ctype", "errno", "fenv", "float", "inttypes", "iso646", "limits"),
    *("locale", "math", "setjmp", "signal", "stdalign", "stdarg", "stdatomic", "stdbool", "stddef"),
    *("stdint", "stdio", "stdlib", "string", "tgmath", "threads", "time", "uchar", "wchar"),
    "wctype",
)
# Of C99 and C++17.
KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t
class compl const const_cast constexpr continue decltype default delete do double dynamic_cast
else enum explicit export extern false float for friend goto if inline int long mutable
namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
reinterpret_cast restrict return short signed sizeof static static_assert static_cast struct
switch template this thread_local throw true try typedef typeid typename union unsigned using
virtual void volatile wchar_t while xor xor_eq
"""
INTEGERS = re.compile(r"u?int(_least|_fast)?(8|16|32|64)(_t)?|u?int(ptr|max)(_t)?")  # of stdint.h
OF_FILE = re.compile(r"^static (?:const )?\w+ \**(\w+)(?=[\[(]| =)", re.MULTILINE)


def check_name(name: str) -> str:
    """Refuse a name that no identifier of C can begin with."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name, re.ASCII):
        raise TpsgdError(
            f"name must have small letters, digits and _, with a letter first, got {name!r}"
        )
    if len(name) > LONGEST:
        raise TpsgdError(f"name must have {LONGEST} characters at most, got {len(name)}")
    if name in HEADERS:
        raise TpsgdError(f"name={name!r} would hide {name}.h of C: take another")
    if name in KEYWORDS.split() or INTEGERS.fullmatch(name):
        raise TpsgdError(f"name={name!r} is a word of C or C++: take another")
    if re.fullmatch(r"(\w+_)?tpsgd", name):
        raise TpsgdError(f"name={name!r} is that of a file of kernels, {name}.h: take another")
    return name


def named(texts: Mapping[str, str], name: str) -> dict[str, str]:
    """The files of a net called `net`, for a net of another name."""
    if name == USUAL:
        return dict(texts)
    return {
        renamed(file, name): _own_names(renamed(text, name), name)
        if file.endswith(".c")
        else renamed(text, name)
        for file, text in texts.items()
    }


def renamed(text: str, name: str) -> str:
    """A text of C in which the net has another name; its kernels get that as a prefix."""
    if name == USUAL:
        return text

    def word(match: re.Match[str]) -> str:
        prefix, file = match.groups()
        if file:
            return name if file == USUAL else f"{name}_{file}"
        own = name.upper() if prefix.isupper() else name
        return f"{own}_" if prefix.lower() == USUAL else f"{own}_{prefix}_"

    return OWN.sub(word, text)


def _own_names(text: str, name: str) -> str:
    """The tables and functions that only this file sees get the prefix, too."""
    for word in {w for w in OF_FILE.findall(text) if not w.startswith(f"{name}_")}:
        text = re.sub(rf"(?<![\w.])(?<!->){word}\b", f"{name}_{word}", text)
    return text


def name_in(files: Iterable[str]) -> str:
    """The name of the net among these files, by the name of its kernels."""
    kernels = [match for file in files if (match := KERNELS.fullmatch(file))]
    if len(kernels) != 1:
        raise TpsgdError(f"expected the three files of one exported net, got {len(kernels)} nets")
    return kernels[0][1] or USUAL
