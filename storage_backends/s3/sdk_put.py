"""A PUT through the SDK: behind proxies, to directory buckets, and to find a bucket's region."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ClientError

from ckptpipe.storage_backends.s3.body import PartBody
from ckptpipe.storage_backends.s3.client import S3Client
from ckptpipe.storage_backends.s3.put import Put
from ckptpipe.storage_backends.s3.watch import Watch


async def put_by_sdk(
    client: S3Client, bucket: str, put: Put, parameters: Mapping[str, str]
) -> tuple[str, str | None]:
    """One attempt: the ETag, and the CRC32C as the store confirms it."""
    stall = client.options.stall_timeout
    body = PartBody(put.leases(), sha256=put.sha256)
    made: dict[str, Any] = {"Bucket": bucket, "Key": put.key, "Body": body, "ContentLength": put.nbytes}
    made.update(parameters)
    if put.part is not None:
        made["PartNumber"], made["UploadId"] = put.part
    api = await client.api()
    send = api.put_object if put.part is None else api.upload_part
    try:
        async with asyncio.timeout(stall) as deadline:
            body.begin()
            with Watch(body.on_the_wire, deadline, stall):
                answer = await send(**made)
    except ClientError:
        if body.sent < put.nbytes:
            body.cut()
        raise
    except BaseException:
        body.cut()
        raise
    finally:
        body.end()
        put.times += body.times
    return str(answer.get("ETag", "")), answer.get("ChecksumCRC32C")
