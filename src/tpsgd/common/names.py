"""Names out of files (of modules, classes, columns), as programs and terminals may read them."""

from unicodedata import category

SIGNS = " _-+.,:;/()=%#@&'"  # none of them ends a comment, joins two lines or begins a tag


def safe(text: object, signs: str = SIGNS) -> str:
    r"""The letters and digits of all scripts and these signs; any other character becomes `_`.

    So a name cannot end a comment of C or begin a tag of HTML, and it has no control characters,
    no line ends and no marks that turn the direction of writing.

    Examples:
        >>> safe("size */ \x1b[31m"), safe("Größe (mm)")
        ('size _/ __31m', 'Größe (mm)')
    """
    return "".join(c if c in signs or category(c)[0] in "LMN" else "_" for c in str(text))


def printable(text: object) -> str:
    r"""All that is printed, for terminals, and for pages, which escape it; the rest becomes `_`.

    Examples:
        >>> printable("<b>\x1b")
        '<b>_'
    """
    return "".join(c if c.isprintable() else "_" for c in str(text))
