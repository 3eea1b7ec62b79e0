"""A certificate authority of our own and a server's certificate for 127.0.0.1, for tests over https."""

from __future__ import annotations

from pathlib import Path

from .s3_server import Certificates


def make_certificates(directory: str | Path) -> Certificates:
    """Write the PEM files into ``directory``, which exists."""
    import trustme

    folder = Path(directory)
    authority = trustme.CA(organization_name="ckptpipe tests")
    issued = authority.issue_cert("127.0.0.1", "localhost")
    made = Certificates(folder / "authority.pem", folder / "server.pem", folder / "server.key")
    made.key.touch(mode=0o600)
    authority.cert_pem.write_to_path(str(made.authority))
    issued.private_key_pem.write_to_path(str(made.key))
    for index, part in enumerate(issued.cert_chain_pems):
        part.write_to_path(str(made.chain), append=index > 0)
    return made
