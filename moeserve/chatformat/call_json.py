"""Reads the JSON of a call. If the format's next tag, or the end of a list around the call, comes before the
JSON's last brackets, the brackets are added."""

from __future__ import annotations

from .json_reader import JSON, Dialect, JsonReader, Status

_LIST_END = "]"  # of a list of calls, where the last call lacks its last brackets


class CallJson:
    """Reads the JSON. `push` takes one character at a time, and must not be called after DONE or BROKEN."""

    def __init__(self, closings: tuple[str, ...], dialect: Dialect = JSON, brackets: str = "{") -> None:
        """closings: the tags that may follow the JSON. brackets: see `JsonReader`."""
        self._reader = JsonReader(dialect, brackets)
        self._closings = closings
        self._tag = ""  # the beginning of a closing tag
        self.shown = ""  # the JSON that the last character added
        self.unread = ""  # after DONE or BROKEN: the end of the text that is not part of the JSON

    @property
    def depth(self) -> int:
        return self._reader.depth

    @property
    def num_held(self) -> int:
        """Returns how many of the last characters are held back."""
        return self._reader.num_held + len(self._tag)

    def push(self, char: str) -> Status:
        self.shown = ""
        tag = self._tag + char
        if (self._tag or self._reader.can_end) and any(one.startswith(tag) for one in self._closings):
            self._tag = tag
            if tag not in self._closings:
                return Status.GOING
            self.unread, self._tag = tag, ""
            self.shown = self._reader.end()
            return Status.DONE
        self._tag = ""
        if tag == _LIST_END and self._reader.can_end and not self._reader.closes(tag):
            self.unread, self.shown = tag, self._reader.end()
            return Status.DONE
        for at, one in enumerate(tag):
            status = self._reader.push(one)
            self.shown += self._reader.shown
            if status is Status.BROKEN:
                self.unread = tag[at:]
                return status
        return status

    def end(self) -> bool:
        """Ends the text. Returns False if the JSON cannot end here."""
        if not self._reader.can_end:
            return False
        self._tag = ""
        self.shown = self._reader.end()
        return True
