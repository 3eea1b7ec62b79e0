"""What the capture library shall do, as the command line says it and as the library reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from ckptpipe.pipeline.errors import UsageError
from ckptpipe.storage_backends.quantities import parse_bytes

Pages = Literal["auto", "thp", "hugetlb", "small"]
Hook = Literal["auto", "relocations", "symbols"]

VARIABLE = "CKPTPIPE_LAUNCH"
PIECE = 2 << 20
_PERCENT = re.compile(r"\s*([0-9]{1,3})\s*%\s*\Z")


@dataclass(frozen=True, slots=True)
class PoolSize:
    """``grow`` (with the first image, plus a margin), so many bytes, or a share of the memory that is free when
    the process begins to use CUDA."""

    nbytes: int = 0
    percent: int = 0

    @property
    def grows(self) -> bool:
        return not self.nbytes and not self.percent

    @classmethod
    def parse(cls, text: str) -> PoolSize:
        """``grow``, ``40GiB``, ``25%``; ValueError says what is wrong."""
        return cls() if text.strip() == "grow" else parse_amount(text)


def parse_amount(text: str) -> PoolSize:
    """``40GiB`` or ``25%``."""
    share = _PERCENT.match(text)
    if share is not None:
        percent = int(share[1])
        if not 1 <= percent <= 100:
            raise ValueError(f"{text!r}: a share is 1% to 100%")
        return PoolSize(percent=percent)
    nbytes = parse_bytes(text)
    if nbytes < PIECE:
        raise ValueError(f"{text!r} is smaller than the driver's copies: at least 2MiB")
    return PoolSize(nbytes=nbytes)


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """``budget``: of all pools of the launched program and its children together. ``margin``: percent kept beyond
    the largest image by a pool that grows. ``workers`` 0: one a usable CPU near the GPU, at most 16.
    ``numa_node`` None: the GPU's. ``hook``: how the driver's calls are redirected."""

    pool: PoolSize = field(default_factory=PoolSize)
    budget: PoolSize = field(default_factory=lambda: PoolSize(percent=90))
    margin: int = 10
    pages: Pages = "auto"
    workers: int = 0
    numa_node: int | Literal["none"] | None = None
    hook: Hook = "auto"
    image_min: int = 1 << 20

    def __post_init__(self) -> None:
        if self.budget.grows:
            raise UsageError("a budget is a size or a share of memory", cure="write it like 40GiB or 50%")
        if self.pool.nbytes and self.budget.nbytes and self.pool.nbytes > self.budget.nbytes:
            raise UsageError(
                f"a pool of {self.pool.nbytes} bytes does not fit into a budget of {self.budget.nbytes}",
                cure="make the budget at least as large as one process's pool",
            )
        if not 0 <= self.margin <= 1000:
            raise UsageError(f"a margin of {self.margin} percent makes no sense", cure="take 0 to 1000")
        if not 0 <= self.workers <= 256:
            raise UsageError(f"{self.workers} workers make no sense", cure="take 0 (choose) to 256")

    def encode(self, budget_path: str = "") -> str:
        """The value of `VARIABLE`. UsageError for a path that it cannot hold."""
        if ";" in budget_path or len(budget_path.encode()) > 255:
            raise UsageError(
                f"the budget's path {budget_path} has a semicolon or is too long",
                cure="set XDG_RUNTIME_DIR to another directory of yours",
            )
        words: dict[str, object] = {"hook": self.hook, "pages": self.pages, "workers": self.workers}
        if self.pool.grows:
            words |= {"pool": "grow", "margin-percent": self.margin}
        elif self.pool.percent:
            words |= {"pool": "share", "pool-percent": self.pool.percent}
        else:
            words |= {"pool": "fixed", "pool-bytes": self.pool.nbytes}
        if self.budget.percent:
            words["budget-percent"] = self.budget.percent
        else:
            words["budget-bytes"] = self.budget.nbytes
        words["numa-node"] = "auto" if self.numa_node is None else self.numa_node
        words["image-min"] = self.image_min
        if budget_path:
            words["budget-path"] = budget_path
        return ";".join(f"{key}={value}" for key, value in words.items())
