"""What a verification found to be damaged: everything is counted, the first of it is told."""

from __future__ import annotations

from ckptpipe.pipeline.errors import ImageCorrupt

LISTED_MOST = 20  # places that are told one by one


class Damage:
    """Collects errors of the image at ``url``; `raise_found` raises them as one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._found: list[ImageCorrupt] = []
        self._kinds: set[type[ImageCorrupt]] = set()
        self.count = 0

    def add(self, error: ImageCorrupt) -> None:
        self.count += 1
        self._kinds.add(type(error))
        if len(self._found) < LISTED_MOST:
            self._found.append(error)

    def raise_found(self) -> None:
        """The error itself where there is one, else one of its kind (ImageCorrupt of several) with the list."""
        if not self._found:
            return
        first = self._found[0]
        if self.count == 1:
            raise first
        kind = self._kinds.pop() if len(self._kinds) == 1 else ImageCorrupt
        error = kind(
            f"{first.message}; in all {self.count} places are damaged",
            cure="restore from another copy of the image",
        )
        error.found = tuple(each.message.removeprefix(f"{self._url}: ") for each in self._found)
        error.count = self.count
        raise error
