"""One plain text to calibrate or evaluate with: the user's file, or the reference that Python's own `help()` shows.

The builtin text is half a megabyte of English about many things, on every machine.
"""

from __future__ import annotations

from pathlib import Path

from moesaic.errors import UserError


def builtin_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(data: Path | None) -> str:
    if data is None:
        return builtin_text()
    try:
        return data.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(data, "no such file", "Name a file of text.") from None
    except UnicodeDecodeError:
        raise UserError(data, "is not UTF-8 text", "Name a file of text.") from None
    except OSError as error:
        raise UserError(data, f"cannot be read ({error.strerror})", "Name a file of text.") from None
