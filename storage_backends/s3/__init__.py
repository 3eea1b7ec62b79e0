"""S3 and what speaks like it: Amazon S3, SeaweedFS, Ceph, MinIO, R2, rclone."""

from ckptpipe.storage_backends.s3.backend import S3Backend
from ckptpipe.storage_backends.s3.options import S3Options

__all__ = ["S3Backend", "S3Options"]
