"""Texts of the program's values for messages: one line each, cut at a length."""

LINE = 200
"""Most characters that indices, keys and other values take in a message."""


def shown(value: object, most: int = LINE) -> str:
    """The ``repr`` of a value, on one line of at most so many characters."""
    try:
        if isinstance(value, memoryview):  # of packed indices
            value = value.tolist()
        return shorten(" ".join(repr(value).split()), most)
    except Exception as reason:  # noqa: BLE001 - the program's own __repr__
        return f"<repr() raises {type(reason).__name__}>"


def shorten(text: str, most: int) -> str:
    """A text, cut at a number of characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
