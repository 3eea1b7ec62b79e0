"""Who may listen and who may connect: owner, mode, links, peers. Tests with another user need root."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptpipe.pipeline.controller import client, runtime_directory
from ckptpipe.pipeline.controller.controller import Controller
from ckptpipe.pipeline.controller.errors import ControllerRefused, ControllerUnavailable
from ckptpipe.pipeline.controller.runtime_directory import candidates, open_for_client, open_for_server
from tests.pipeline.controller.stand_in import on_loop, program, runs, serving, victim

OTHER = 54321  # a uid that nobody has
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user as well")


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "run" / "controller.sock"


@pytest.fixture
def listening(socket: Path) -> Iterator[sockets.socket]:
    """A socket as a controller makes it, with nobody behind it."""
    directory = open_for_server(socket)
    try:
        with directory.listening(1) as listener:
            yield listener
    finally:
        directory.close()


def test_made_private(socket: Path, listening: sockets.socket) -> None:
    assert socket.parent.stat().st_mode & 0o7777 == 0o700
    assert socket.lstat().st_mode & 0o7777 == 0o600
    open_for_client(socket).close()


def test_a_long_path_is_no_problem(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["d" * 50] * 5)  # far beyond the 108 bytes of a Unix socket's address
    folder.mkdir(parents=True)

    async def body() -> None:
        async with serving(folder / "run" / "controller.sock") as server, await server.connect():
            pass

    on_loop(body)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o777, 0o500])
def test_a_directory_of_another_mode(socket: Path, mode: int) -> None:
    socket.parent.mkdir()
    socket.parent.chmod(mode)
    for end in (open_for_server, open_for_client):
        with pytest.raises(ControllerRefused, match=f"has mode {mode:04o}, not 0700") as refused:
            end(socket)
        assert f"chmod 0700 {socket.parent}" in refused.value.cure


def test_a_directory_that_is_a_link(socket: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    socket.parent.symlink_to(tmp_path / "elsewhere")
    for end in (open_for_server, open_for_client):
        with pytest.raises(ControllerRefused, match="is a symbolic link"):
            end(socket)
    socket.parent.unlink()
    socket.parent.write_text("")
    with pytest.raises(ControllerRefused, match="is not a directory"):
        open_for_server(socket)


def test_a_parent_that_others_can_write(socket: Path, tmp_path: Path) -> None:
    open_for_server(socket).close()
    tmp_path.chmod(0o777)
    with pytest.raises(ControllerRefused, match="can be written by others"):
        open_for_client(socket)
    tmp_path.chmod(0o1777)  # as /tmp: only the owner may rename
    with pytest.raises(ControllerUnavailable):
        open_for_client(socket)


def test_what_is_not_a_socket(socket: Path) -> None:
    socket.parent.mkdir(mode=0o700)
    with pytest.raises(ControllerUnavailable, match="is not there"):
        open_for_client(socket)
    socket.write_text("mine")
    with pytest.raises(ControllerRefused, match="a file, not a socket"):
        open_for_client(socket)
    directory = open_for_server(socket)
    with pytest.raises(ControllerRefused, match="a file, not a socket"), directory.listening(1):
        pass
    directory.close()
    assert socket.read_text() == "mine"
    socket.unlink()
    socket.symlink_to("/nowhere")
    with pytest.raises(ControllerRefused, match="a symbolic link, not a socket"):
        open_for_client(socket)


def test_a_socket_of_another_mode(socket: Path, listening: sockets.socket) -> None:
    socket.chmod(0o660)
    with pytest.raises(ControllerRefused, match="has mode 0660, not 0600"):
        open_for_client(socket)


def test_a_server_removes_only_its_own_socket(socket: Path) -> None:
    directory = open_for_server(socket)
    with directory.listening(1):
        socket.unlink()
        socket.write_text("somebody else's")
    directory.close()
    assert socket.read_text() == "somebody else's"


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Path(f"/tmp/ckptpipe-{os.geteuid()}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert candidates()[0] == tmp_path / "ckptpipe"
    assert candidates()[-1] == usual
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert tmp_path / "ckptpipe" not in candidates()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert candidates()[-1] == usual


@needs_root
def test_somebody_elses_runtime_directory_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, OTHER, OTHER)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert tmp_path / "ckptpipe" not in candidates()


@needs_root
def test_a_directory_of_another_user(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    socket.parent.mkdir(mode=0o700)
    os.chown(socket.parent, OTHER, OTHER)
    with pytest.raises(ControllerRefused, match=f"belongs to uid {OTHER}, not to uid 0"):
        open_for_server(socket)
    monkeypatch.setattr(runtime_directory, "candidates", lambda: [socket.parent])
    with pytest.raises(ControllerRefused, match=f"belongs to uid {OTHER}, not to uid 0"):
        open_for_client()
    with pytest.raises(ControllerUnavailable):  # named with --socket, root may go there
        open_for_client(socket)


@needs_root
def test_root_talks_to_a_users_controller_and_not_the_other_way_round(tmp_path: Path) -> None:
    # pytest's folders above it are its user's own: two, and one more where each process of the tests has one.
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, OTHER, OTHER)
    theirs = home / "run" / "controller.sock"
    with program(theirs, "--user", str(OTHER)):
        assert theirs.stat().st_uid == OTHER

        async def as_root() -> None:
            async with await Controller.connect(theirs) as controller:
                with victim() as pid:
                    assert (await controller.state(pid))[0].state == "RUNNING"

        on_loop(as_root)
    ours = tmp_path / "ours" / "controller.sock"

    async def as_somebody() -> None:
        async with serving(ours) as server:
            # They cannot even enter the directory; and where the door stands open, the peer's uid is looked at.
            assert "Permission denied" in await asyncio.to_thread(_knock, ours)
            ours.parent.chmod(0o755)
            ours.chmod(0o666)
            told = await asyncio.to_thread(_knock, ours)
            assert f"uid {OTHER} may not use the controller of uid 0" in told
            assert any("is refused" in line for line in server.said)

    on_loop(as_somebody)


def _knock(socket: Path) -> str:
    """What another user gets to hear from the server, if they can connect. Blocking."""
    code = (
        "import os, socket, sys\n"
        f"os.setgroups([]); os.setgid({OTHER}); os.setuid({OTHER})\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "try:\n    s.connect(sys.argv[1])\n"
        "except OSError as error:\n    print(error); sys.exit()\n"
        "try:\n    s.sendall(bytes([0, 0, 0, 2]) + b'{}')\n"
        "except BrokenPipeError:\n    pass\n"  # refused already: the reason can still be read
        "while part := s.recv(65536):\n    print(part.decode(errors='replace'))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(socket)], capture_output=True, text=True, check=False, timeout=30
    ).stdout


@needs_root
def test_a_listener_of_another_user_is_not_talked_to(socket: Path) -> None:
    """Root's directory, but somebody else listens: the kernel's word on the peer counts."""
    socket.parent.mkdir(mode=0o700)
    os.chown(socket.parent, OTHER, OTHER)
    socket.parent.parent.chmod(0o755)
    with sockets.socket(sockets.AF_UNIX) as listener:
        listener.bind(str(socket))
        listener.listen(1)
        os.chown(socket, OTHER, OTHER)
        socket.chmod(0o600)

        async def body() -> None:
            with pytest.raises(ControllerRefused, match=f"uid 0 listens at .* which belongs to uid {OTHER}"):
                await client.greet(socket)

        on_loop(body)


def test_nobody_listens(socket: Path) -> None:
    async def body() -> None:
        assert not await runs(socket)

    on_loop(body)
    with program(socket) as server:
        server.kill()
    assert socket.is_socket()
    on_loop(body)
