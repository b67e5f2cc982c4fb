"""Text of others as a terminal may show it."""


def printable(text: str) -> str:
    """Escapes what a terminal would act on, such as colours and cursor movements. Line breaks stay."""
    if all(char.isprintable() or char == "\n" for char in text):
        return text
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()
