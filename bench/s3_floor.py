"""The least CPU that S3 requests can take on a machine: a bare loop in C over the same requests.

As many connections and the same parts as ckptpipe has, requests signed beforehand, one small buffer a connection
that stays in the core's cache; what is sent is checksummed before (a part's checksum stands in its head) and then not
copied (sendfile). No ring, no retries, nothing that waits: what another client takes more of is its own. The multipart upload is begun and completed outside of what is measured.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlsplit

from bench.measured import Cost, MeasuredWorkFailed, cpu_of_children

SOURCE = Path(__file__).resolve().with_name("s3_floor.c")
KERNELS = SOURCE.parent.parent / "pyx" / "kernels"
KEY = "bare"


def compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc")


def build(folder: Path) -> Path:
    """The compiled loop, in ``folder``."""
    program = folder / "s3_floor"
    parts = [SOURCE, KERNELS / "crc32c.c", KERNELS / "crc32c_native.c"]
    made = compiler()
    assert made is not None, "ask `compiler` first"
    subprocess.run([made, "-O2", "-pthread", f"-I{KERNELS}", "-o", program, *parts], check=True)
    return program


class Floor:
    """The loop, against one bucket of one server (http, path style). ``environment``: as AWS's tools read it."""

    def __init__(
        self, program: Path, environment: Mapping[str, str], *, part_bytes: int, parallel: int
    ) -> None:
        self._program = program
        self._environment = environment
        self._server = urlsplit(environment["AWS_ENDPOINT_URL"])
        self._part_bytes = part_bytes
        self._parallel = parallel

    def put(self, source: Path, bucket: str, client: Any) -> Cost:
        """``client``: botocore's, for the upload's begin and end."""
        place = {"Bucket": bucket, "Key": KEY}
        upload = client.create_multipart_upload(**place)["UploadId"]
        parts = self._parts(source.stat().st_size)
        heads = [
            self._head(
                "PUT", bucket, {"partNumber": str(number), "uploadId": upload}, {"Content-Length": str(n)}
            )
            for number, (_, n) in enumerate(parts, 1)
        ]
        cost, etags = self._run("put", str(source), parts, heads)
        listed = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": listed})
        return cost

    def get(self, target: Path | None, bucket: str, nbytes: int) -> Cost:
        """Of what `put` stored, to a file or to nowhere."""
        parts = self._parts(nbytes)
        heads = [self._head("GET", bucket, {}, {"Range": f"bytes={at}-{at + n - 1}"}) for at, n in parts]
        return self._run("get", str(target or "-"), parts, heads)[0]

    def _parts(self, nbytes: int) -> list[tuple[int, int]]:
        step = self._part_bytes
        return [(start, min(step, nbytes - start)) for start in range(0, nbytes, step)]

    def _head(self, method: str, bucket: str, query: Mapping[str, str], added: Mapping[str, str]) -> bytes:
        from ckptpipe.storage_backends.s3.sigv4 import EMPTY_SHA256, UNSIGNED_PAYLOAD, Signer

        path = f"/{bucket}/{KEY}"
        headers = {"Host": self._server.netloc, **added}
        asked = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in sorted(query.items()))
        Signer().sign(
            path,
            headers,
            SimpleNamespace(
                access_key=self._environment["AWS_ACCESS_KEY_ID"],
                secret_key=self._environment["AWS_SECRET_ACCESS_KEY"],
                token=None,
            ),
            self._environment["AWS_REGION"],
            "s3",
            datetime.now(UTC),
            method=method,
            query=asked,
            payload=UNSIGNED_PAYLOAD if method == "PUT" else EMPTY_SHA256,
        )
        lines = [
            f"{method} {path}{'?' + asked if asked else ''} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def _run(
        self, what: str, file: str, parts: Sequence[tuple[int, int]], heads: Sequence[bytes]
    ) -> tuple[Cost, list[str]]:
        plan = self._program.with_suffix(".plan")
        with plan.open("wb") as written:
            for (offset, nbytes), head in zip(parts, heads, strict=True):
                written.write(b"%d %d %d\n%b" % (offset, nbytes, len(head), head))
        host, port = str(self._server.hostname), str(self._server.port or 80)
        before = cpu_of_children()
        run = subprocess.run(
            [self._program, what, file, host, port, str(self._parallel), plan],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise MeasuredWorkFailed(f"s3_floor {what} failed: {run.stderr[-2000:]}")
        *etags, figures = run.stdout.splitlines()
        seconds, cpu_seconds, peak = figures.split()
        whole = cpu_of_children() - before
        return Cost(float(seconds), float(cpu_seconds), int(peak) * 1024, whole_cpu_seconds=whole), etags
