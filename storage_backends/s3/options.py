"""Options of the S3 backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptpipe.storage_backends.options import option

MIB = 1 << 20
MIN_PART = 5 * MIB  # of S3 itself; only the last part of an object may be smaller
MAX_PARTS = 10_000
SPARE_PARTS = 100  # what may be sent early, smaller than part_bytes


@dataclass(frozen=True, slots=True)
class S3Options:
    """What the environment does not say. Credentials are never options: botocore's chain finds them."""

    endpoint_url: str = option(
        "", "URL of the S3 service; empty: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS itself"
    )
    region: str = option(
        "", "region of the bucket; empty: AWS_REGION, AWS_DEFAULT_REGION, the profile, us-east-1"
    )
    profile: str = option("", "profile of the AWS configuration files; empty: AWS_PROFILE, default")
    no_sign_request: bool = option(False, "send requests unsigned, without looking for credentials")
    ca_bundle: str = option("", "PEM file of the certificate authorities to trust; empty: AWS_CA_BUNDLE")
    verify: bool = option(True, "check the server's TLS certificate")
    addressing_style: Literal["auto", "path", "virtual"] = option(
        "auto", "where the bucket's name goes; auto: in the path for endpoints other than AWS"
    )
    part_bytes: int = option(16 * MIB, "size of a multipart upload's parts", unit="bytes", minimum=MIN_PART)
    equal_parts: Literal["auto", "on", "off"] = option(
        "auto", "all parts but the last have exactly part_bytes; auto: where the store is known to want it"
    )
    concurrency: int = option(8, "parts and ranges in flight together", minimum=1)
    payload_signing: Literal["auto", "on", "off"] = option(
        "auto", "hash every body with SHA-256 into its signature; auto: only for a store that insists"
    )
    checksum: Literal["auto", "crc32c", "off"] = option(
        "auto", "send the CRC32C of every part and object; auto: where the store takes it"
    )
    connect_timeout: float = option(5.0, "seconds to wait for a connection", unit="seconds", minimum=0.1)
    stall_timeout: float = option(
        30.0,
        "seconds without progress after which a request is given up and sent again",
        unit="seconds",
        minimum=0.1,
    )
    attempts: int = option(6, "times that a request is sent before its error is final", minimum=1)
    storage_class: str = option("", "storage class of new objects; empty: the bucket's default")
    server_side_encryption: Literal["", "AES256", "aws:kms", "aws:kms:dsse"] = option(
        "", "encryption that is asked of the store for new objects; empty: the bucket's default"
    )
    kms_key_id: str = option("", "key for aws:kms")
    expected_bucket_owner: str = option("", "account that must own the bucket")
