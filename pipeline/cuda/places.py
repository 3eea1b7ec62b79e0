"""A few chunks' worth of device memory, taken and given back: where bytes wait that are on their way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ckptpipe.pipeline.cuda.driver import CudaDriver

if TYPE_CHECKING:
    from ckptpipe.pipeline.cuda.links import Link


class DevicePlaces:
    """``count`` places of ``nbytes`` each, in one allocation. Made by `open`; `aclose` when nothing uses them."""

    def __init__(self, driver: CudaDriver, context: int, address: int, count: int, nbytes: int) -> None:
        self.nbytes = count * nbytes
        self._driver = driver
        self._context = context
        self._address = address
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for place in range(address, address + self.nbytes, nbytes):
            self._free.put_nowait(place)

    @classmethod
    async def open(cls, driver: CudaDriver, context: int, count: int, nbytes: int) -> DevicePlaces:
        """CudaError where the GPU has not so much memory."""
        return cls(driver, context, await driver.allocate(context, count * nbytes), count, nbytes)

    @asynccontextmanager
    async def one(self, link: Link) -> AsyncIterator[int]:
        """The address of a free place, waited for. It is free again when ``link`` is done with it, also after a
        cancellation."""
        place = await self._free.get()
        try:
            yield place
        except asyncio.CancelledError:
            await link.drain()
            raise
        finally:
            self._free.put_nowait(place)

    async def aclose(self) -> None:
        await self._driver.free(self._context, self._address)
