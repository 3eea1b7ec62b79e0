"""The S3 clients that are compared, each as its users would call it, with the same parts and parallelism.

Every function prepares (imports, opens its client) and returns the work that is measured. Credentials and
endpoint come from the environment. ``target`` of a GET is a file's path, or "" to throw the bytes away.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bench.measured import Cost, Work, run_program

PART_BYTES = 16 << 20
PARALLEL = 8


class _Discard:
    """A writable file without a memory."""

    def write(self, data: bytes) -> int:
        return len(data)


def ckptpipe_put(source: str, bucket: str) -> Work:
    import ckptpipe
    import ckptpipe.storage_backends.s3.backend  # as the others import their SDK here

    def work() -> Mapping[str, Any]:
        result = ckptpipe.save_blocking(source, to=f"s3://{bucket}/ckptpipe", name="image")
        return {"bytes": result.raw_bytes, "retries": result.sinks[0].retries}

    return work


def ckptpipe_get(target: str, bucket: str) -> Work:
    import ckptpipe
    import ckptpipe.storage_backends.s3.backend

    url = f"s3://{bucket}/ckptpipe/image"

    def work() -> Mapping[str, Any]:
        result = ckptpipe.restore_blocking(url, to=target) if target else ckptpipe.verify_blocking(url)
        return {"bytes": result.raw_bytes, "retries": result.retries}

    return work


def boto3_put(source: str, bucket: str) -> Work:
    client, config = _boto3()

    def work() -> None:
        client.upload_file(source, bucket, "boto3", Config=config)

    return work


def boto3_get(target: str, bucket: str) -> Work:
    client, config = _boto3()

    def work() -> None:
        if target:
            client.download_file(bucket, "boto3", target, Config=config)
        else:
            client.download_fileobj(bucket, "boto3", _Discard(), Config=config)

    return work


def awscrt_put(source: str, bucket: str) -> Work:
    manager = _awscrt()

    def work() -> None:
        with manager:
            manager.upload(source, bucket, "awscrt").result()

    return work


def awscrt_get(target: str, bucket: str) -> Work:
    manager = _awscrt()

    def work() -> None:
        with manager:
            manager.download(bucket, "awscrt", target or _Discard()).result()

    return work


def s5cmd_put(source: str, bucket: str, environment: Mapping[str, str]) -> Cost:
    return run_program(
        [*_S5CMD, "cp", *_S5CMD_PARTS, source, f"s3://{bucket}/s5cmd"], environment=_for_s5cmd(environment)
    )


def s5cmd_get(target: str, bucket: str, environment: Mapping[str, str]) -> Cost:
    where = (
        ["cp", *_S5CMD_PARTS, f"s3://{bucket}/s5cmd", target]
        if target
        else ["cat", *_S5CMD_PARTS, f"s3://{bucket}/s5cmd"]
    )
    return run_program([*_S5CMD, *where], environment=_for_s5cmd(environment))


_S5CMD = ("s5cmd", "--log", "error")
_S5CMD_PARTS = ("--concurrency", str(PARALLEL), "--part-size", str(PART_BYTES >> 20))


def _for_s5cmd(environment: Mapping[str, str]) -> dict[str, str]:
    """s5cmd reads the endpoint from a variable of its own."""
    return {**environment, "S3_ENDPOINT_URL": environment["AWS_ENDPOINT_URL"]}


def _boto3() -> tuple[Any, Any]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    client = boto3.client(
        "s3", config=Config(s3={"addressing_style": "path"}, max_pool_connections=PARALLEL + 2)
    )
    config = TransferConfig(
        multipart_threshold=PART_BYTES,
        multipart_chunksize=PART_BYTES,
        max_concurrency=PARALLEL,
        preferred_transfer_client="classic",
    )
    return client, config


def _awscrt() -> Any:
    """boto3's own transfer manager over the CRT; made here, since boto3 gives its CRT client TLS always."""
    import botocore.session
    from s3transfer.crt import (
        BotocoreCRTCredentialsWrapper,
        BotocoreCRTRequestSerializer,
        CRTTransferManager,
        create_s3_crt_client,
    )

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    session = botocore.session.get_session()
    credentials = BotocoreCRTCredentialsWrapper(session.get_credentials())
    client = create_s3_crt_client(
        os.environ["AWS_REGION"],
        crt_credentials_provider=credentials.to_crt_credentials_provider(),
        part_size=PART_BYTES,
        use_ssl=endpoint.startswith("https:"),
        verify=os.environ.get("AWS_CA_BUNDLE") or None,
    )
    serializer = BotocoreCRTRequestSerializer(
        session, {"region_name": os.environ["AWS_REGION"], "endpoint_url": endpoint}
    )
    return CRTTransferManager(client, serializer)
