"""What tests of whole operations share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def client(s3_bucket: str) -> Iterator[Any]:
    """Another program's look at the bucket."""
    import boto3

    made = boto3.client("s3")
    yield made
    made.close()
