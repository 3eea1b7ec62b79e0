"""The steps of a clean-up: each is tried, whatever became of those before it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from ckptpipe.pipeline.parallel import in_parallel
from ckptpipe.pyx.errors import CkptpipeError
from ckptpipe.storage_backends.errors import StorageError

AT_ONCE = 8  # requests to a store: deleting, or looking at, objects side by side


class Removal:
    """What failed of a clean-up so far; `end` raises it as one error."""

    def __init__(self) -> None:
        self.failed: list[CkptpipeError | OSError] = []

    async def step(self, work: Awaitable[object]) -> bool:
        """Whether it went well."""
        try:
            await work
        except (CkptpipeError, OSError) as error:
            self.failed.append(error)
            return False
        return True

    async def steps(self, work: Iterable[Callable[[], Awaitable[object]]]) -> int:
        """Side by side, in whatever order; how many went well."""
        left, well = iter(work), 0

        async def some() -> None:
            nonlocal well
            for begin in left:
                done = await self.step(begin())
                well += done

        await in_parallel(AT_ONCE, some)
        return well

    def end(self, cure: str = "") -> None:
        """StorageError with the first failure and the number of the others, where there was one."""
        if not self.failed:
            return
        first = self.failed[0]
        message = first.message if isinstance(first, CkptpipeError) else str(first) or type(first).__name__
        also = f" (and {len(self.failed) - 1} more)" if len(self.failed) > 1 else ""
        cure = cure or (first.cure if isinstance(first, CkptpipeError) else "")
        raise StorageError(message + also, cure=cure) from first
