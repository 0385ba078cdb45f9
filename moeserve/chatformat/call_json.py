"""The JSON of a call, which the format's next tag may end before its last brackets."""

from __future__ import annotations

from .json_reader import JSON, Dialect, JsonReader, Status


class CallJson:
    """Push character after character; nothing after DONE or BROKEN."""

    def __init__(self, closings: tuple[str, ...], dialect: Dialect = JSON, brackets: str = "{") -> None:
        """`closings`: the tags that may follow the JSON. brackets: as for JsonReader."""
        self._reader = JsonReader(dialect, brackets)
        self._closings = closings
        self._tag = ""  # the beginning of a closing
        self.shown = ""  # the JSON that the last character has added
        self.unread = ""  # after DONE and BROKEN: the end of the text, which is no part of the JSON

    @property
    def depth(self) -> int:
        return self._reader.depth

    @property
    def num_held(self) -> int:
        """How many of the last characters have not been shown yet."""
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
        for at, one in enumerate(tag):
            status = self._reader.push(one)
            self.shown += self._reader.shown
            if status is Status.BROKEN:
                self.unread = tag[at:]
                return status
        return status

    def end(self) -> bool:
        """The text ends here. False where the JSON could not."""
        if not self._reader.can_end:
            return False
        self._tag = ""
        self.shown = self._reader.end()
        return True
