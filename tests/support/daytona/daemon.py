"""The program inside a stand-in sandbox: PID 1, standard library only, one thread, no event loop.

It takes requests from the service on a ``SOCK_SEQPACKET`` socket, its only link to the outside, and answers each with
one JSON message and, where there is something to talk to, descriptors: a new process's pipes or terminal, an open file,
a TCP connection to a port of this network namespace. The service talks to those directly; nothing is copied in here.
"""

# pathlib would cost each sandbox a megabyte.
# ruff: noqa: PTH101, PTH103, PTH104, PTH108, PTH112, PTH114, PTH116, PTH120

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import termios
from typing import Any

Answer = tuple[dict[str, Any], list[int]]
INLINE = 32 * 1024

children: set[int] = set()


def spawn(argv: list[str], env: dict[str, str], cwd: str, tty: list[int] | None = None, merge: bool = False) -> Answer:
    """Start a process in a session of its own. Descriptors: [stdin, stdout, stderr] or [terminal]."""
    if not os.path.isdir(cwd):
        raise NotADirectoryError(errno.ENOENT, "no such directory", cwd)
    if tty:
        outer, inner = os.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", tty[1], tty[0], 0, 0))
        mine, theirs = [outer], [inner, inner, inner]
    else:
        (in_r, in_w), (out_r, out_w) = os.pipe(), os.pipe()
        err_r, err_w = (-1, out_w) if merge else os.pipe()
        mine, theirs = [in_w, out_r] + ([] if merge else [err_r]), [in_r, out_w, err_w]
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            if tty:
                fcntl.ioctl(theirs[0], termios.TIOCSCTTY, 0)
            for number, descriptor in enumerate(theirs):
                os.dup2(descriptor, number)
            for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.chdir(cwd)
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)
    for descriptor in set(theirs):
        os.close(descriptor)
    children.add(pid)
    return {"pid": pid}, mine


def kill(pid: int, number: int, group: bool = False) -> Answer:
    """Signal a process, its group, or (pid -1) everything but this daemon."""
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    return {}, []


def connect(port: int) -> Answer:
    connection = socket.create_connection(("127.0.0.1", port), timeout=2)
    connection.setblocking(False)
    return {}, [connection.detach()]


def fifos(folder: str, names: list[str]) -> Answer:
    """Named pipes, open at both ends here so that neither side ever waits for the other."""
    os.makedirs(folder, exist_ok=True)
    for name in names:
        os.mkfifo(f"{folder}/{name}")
    return {}, [os.open(f"{folder}/{name}", os.O_RDWR | os.O_NONBLOCK) for name in names]


def read(path: str) -> Answer:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if os.path.isdir(path):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, "is a directory", path)
    return {"size": os.fstat(descriptor).st_size}, [descriptor]


def write(path: str) -> Answer:
    """A new file beside ``path``, to be put in its place by ``move``."""
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"
    return {"path": temporary}, [os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)]


def _describe(path: str) -> dict[str, Any]:
    found = os.stat(path)
    return {
        "path": path,
        "mode": found.st_mode,
        "size": found.st_size,
        "mtime": found.st_mtime,
        "uid": found.st_uid,
        "gid": found.st_gid,
    }


def info(path: str) -> Answer:
    return _describe(path), []


def listing(path: str, depth: int = 1) -> Answer:
    found = []
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        with contextlib.suppress(OSError):  # a dangling link, or gone by now
            found.append(_describe(entry.path))
            if depth > 1 and entry.is_dir(follow_symlinks=False):
                found += listing(entry.path, depth - 1)[0]["files"]
    return {"files": found}, []


def folder(path: str, mode: int) -> Answer:
    os.makedirs(path, exist_ok=True)
    os.chmod(path, mode)
    return {}, []


def remove(path: str, recursive: bool = False) -> Answer:
    if not os.path.isdir(path) or os.path.islink(path):
        os.unlink(path)
    elif recursive:
        import shutil  # costs memory, and is hardly ever needed

        shutil.rmtree(path)
    else:
        raise IsADirectoryError(errno.EISDIR, "cannot delete directory without recursive flag", path)
    return {}, []


def move(source: str, destination: str) -> Answer:
    os.rename(source, os.path.realpath(destination))
    return {}, []


def chmod(path: str, mode: int) -> Answer:
    os.chmod(path, mode)
    return {}, []


OPERATIONS = {
    each.__name__: each
    for each in (spawn, kill, connect, fifos, read, write, info, listing, folder, remove, move, chmod)
}  # fmt: skip


def answer(control: socket.socket, request: dict[str, Any]) -> None:
    descriptors: list[int] = []
    try:
        reply, descriptors = OPERATIONS[request.pop("do")](**request.pop("with"))
    except OSError as error:
        reply = {"errno": error.errno or errno.ETIMEDOUT, "error": error.strerror or str(error)}
    data = json.dumps(reply).encode()
    if len(data) > INLINE:
        descriptors = [os.memfd_create("reply"), *descriptors]
        os.write(descriptors[0], data)
        os.lseek(descriptors[0], 0, os.SEEK_SET)
        data = b'{"elsewhere":true}'
    message = b'{"id":%d,"reply":%s}' % (request["id"], data)
    try:
        socket.send_fds(control, [message], descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def reap(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if pid in children:
                children.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                control.send(b'{"ended":%d,"code":%d}' % (pid, code if code >= 0 else 128 - code))


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.umask(0o022)
    control.send(b'{"id":0,"reply":{}}')
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake_r, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == wake_r:
                os.read(wake_r, 4096)
            else:
                data = control.recv(1 << 20)
                if not data:  # the service let go of this sandbox
                    return
                answer(control, json.loads(data))
        reap(control)


if __name__ == "__main__":
    main()
