"""Save ids: what makes the object names of one save unlike those of any other.

``YYYYMMDDTHHMMSSZ-`` (UTC, when the save began) and 12 lower-case hexadecimal digits of randomness.
"""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime

PATTERN = r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{12}"
_SAVE_ID = re.compile(PATTERN, re.ASCII)
_TIME = "%Y%m%dT%H%M%SZ"


def new_save_id(now: datetime | None = None) -> str:
    """A new id for a save that begins ``now`` (an aware datetime; default: the current time)."""
    moment = datetime.now(UTC) if now is None else now.astimezone(UTC)
    return f"{moment.strftime(_TIME)}-{secrets.token_hex(6)}"


def is_save_id(text: str) -> bool:
    """Whether ``text`` has the form of a save id and its time is one."""
    if not _SAVE_ID.fullmatch(text):
        return False
    try:
        save_time(text)
    except ValueError:
        return False
    return True


def save_time(save_id: str) -> datetime:
    """When the save began, UTC, by the clock of the machine that saved."""
    return datetime.strptime(save_id[:16], _TIME).replace(tzinfo=UTC)
