"""A running S3 server, whichever program it is: address, credentials, and its end."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .process import Process

ACCESS_KEY = "CKPTPIPETESTKEY00001"
SECRET_KEY = "ckptpipe-test-secret-key-0123456789abcdef"


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files: the authority's certificate, the server's certificate chain and key."""

    authority: Path
    chain: Path
    key: Path


@dataclass
class S3Server:
    """``bucket`` exists already; ``ca_bundle`` is None over http."""

    endpoint_url: str
    access_key: str
    secret_key: str
    bucket: str
    directory: Path
    process: Process
    leftovers: tuple[Path, ...] = ()  # what the program leaves outside its directory
    region: str = "us-east-1"
    ca_bundle: Path | None = None
    port: int = 0

    def environment(self) -> dict[str, str]:
        """What the AWS tools and ckptpipe read."""
        values = {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
        }
        if self.ca_bundle is not None:
            values["AWS_CA_BUNDLE"] = str(self.ca_bundle)
        return values

    def client_options(self) -> dict[str, Any]:
        """Keyword arguments of ``boto3.client("s3", …)`` and of botocore's ``create_client``."""
        return {
            "endpoint_url": self.endpoint_url,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "region_name": self.region,
            "verify": str(self.ca_bundle) if self.ca_bundle else None,
        }

    def stop(self) -> None:
        """End the server and remove its data. Idempotent."""
        self.process.stop()
        shutil.rmtree(self.directory, ignore_errors=True)
        for path in self.leftovers:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
