"""Device codec: stored bytes that lie on the device already are checked, decoded and refused as those of a lease are."""

from __future__ import annotations

import crc32c as reference
import pytest

from ckptpipe.pyx.device_codec import EncodePlan, StoredMismatch
from tests.pyx.codecs import ANS, CHUNK, DEFLATE, codec_on, data_of, encoded
from tests.pyx.gpu import Machine, machine
from tests.pyx.loops import run

PLANS = [EncodePlan(DEFLATE, 1), EncodePlan(DEFLATE, 0, transform=1), EncodePlan(ANS, ans_type=1)]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan)))
def test_decoded_from_the_device(plan: EncodePlan) -> None:
    raw = data_of("bf16")

    async def main(gpus: Machine) -> None:
        async with codec_on(gpus) as codec:
            stored, found = await encoded(codec, gpus.allocate(0, raw), raw, plan)
            assert found.planes
            loaded, target = gpus.allocate(0, stored), gpus.allocate(0, CHUNK)
            facts = len(stored), found.stored_crc32c, len(raw), found.transform, found.planes
            assert await codec.decode_loaded(loaded, *facts, target) == reference.crc32c(raw)
            assert gpus.read(0, target, CHUNK) == raw
            assert gpus.read(0, loaded, len(stored)) == stored, "what is decoded stays as it was"

            flipped = gpus.allocate(0, bytes([stored[0] ^ 1]) + stored[1:])
            other = gpus.allocate(0, b"\x55" * CHUNK)
            with pytest.raises(StoredMismatch):
                await codec.decode_loaded(flipped, *facts, other)
            assert gpus.read(0, other, CHUNK) == b"\x55" * CHUNK, "no decoder has run"
            for bad in (loaded + 4, 0):
                with pytest.raises(ValueError, match=r"multiple of 256|no device memory|device"):
                    codec.decode_loaded(bad, *facts, target)
            assert codec.inflight == 0

    with machine(gpus=1) as gpus:
        run(main(gpus))
