"""Waits until an S3 server really stores objects: makes buckets, stores one byte in each, removes it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from .process import Process, ServiceError


def make_buckets(
    process: Process, options: Mapping[str, Any], buckets: Sequence[str], *, what: str, timeout: float = 60.0
) -> None:
    import botocore.config
    import botocore.exceptions
    import botocore.session

    config = botocore.config.Config(
        retries={"max_attempts": 0},
        connect_timeout=2,
        read_timeout=10,
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
    )
    client = botocore.session.Session().create_client("s3", config=config, **options)
    try:
        deadline = time.monotonic() + timeout
        for bucket in buckets:
            while True:
                try:
                    try:
                        client.create_bucket(Bucket=bucket)
                    except client.exceptions.BucketAlreadyOwnedByYou:
                        pass
                    client.put_object(Bucket=bucket, Key=".ready", Body=b"1")
                    client.delete_object(Bucket=bucket, Key=".ready")
                    break
                except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
                    if not process.running() or time.monotonic() > deadline:
                        raise ServiceError(
                            f"{what} stores nothing ({error}): {process.log_tail()}"
                        ) from error
                    time.sleep(0.05)
    finally:
        client.close()
