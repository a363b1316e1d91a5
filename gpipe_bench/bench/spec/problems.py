"""A rule that settings break together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """A rule that settings of one section break together.

    Attributes:
        fields: the settings that the rule is about; the first one is named in the message.
        text: ``must be <rule>, got <value>; <what to change>``, or a sentence with a subject of its own.
    """

    fields: tuple[str, ...]
    text: str

    def message(self, name: str) -> str:
        """The problem in words.

        Args:
            name: what to call the first setting.
        """
        return f"{name}{' ' if self.text.startswith('must ') else ': '}{self.text}"
