"""Print text while its tokens are generated."""

from __future__ import annotations

from collections.abc import Callable

HELD = 16  # tokens; a character has at most four bytes, each of them perhaps a token


class TextStream:
    """Turns tokens into text as they arrive, and holds back bytes that may be the beginning of a character."""

    def __init__(self, decode: Callable[[list[int]], str], write: Callable[[str], object]) -> None:
        self.decode, self.write = decode, write
        self._held: list[int] = []

    def add(self, token: int) -> None:
        """Add one token."""
        self._held.append(token)
        if len(self._held) >= HELD or not self.decode(self._held).endswith("\ufffd"):
            self.close()

    def close(self) -> None:
        """Write what was held back; an incomplete character becomes U+FFFD."""
        self.write(self.decode(self._held))
        self._held = []
