# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Compiled kernels on disk, shared by processes and nodes that may all start cold at once.

A file's name holds a hash of all that went into it, and a file appears under that name whole or not at all (written
elsewhere, then renamed). So whoever finds it may use it, without a lock. To make a missing one, a process takes a lock
and builds in a folder of its own:

    <folder>/<stem>.so                what everybody wants
    <folder>/<stem>.lock              held (flock) by who builds it; the system frees it when that process dies
    <folder>/<stem>.failed            the error of the last build, for those that waited for it
    <folder>/<stem>.build-XXXXXXXX/   one attempt; what a killed compiler leaves or still writes is in nobody's way

A file lock, not a lock file: one left by a killed build (torch's `lock`) makes the next process wait for ever.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

CACHE_ENV = "DS_FP4_CACHE"
NOTICE_AFTER_S = 30.0
POLL_S = 0.1
# Folders of attempts that nobody has written to for so long are a dead process's.
STALE_AFTER_S = 24 * 3600.0

# What flock says where the file system has none.
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


class BuildError(RuntimeError):
    """A build failed, here or in the process that this one waited for; the text is the build's."""


class _Unusable(Exception):
    """The cache folder cannot be built in: not writable, or no locks."""


def folder() -> Path:
    """Where compiled kernels go: $DS_FP4_CACHE, or `ds_fp4` in torch's folder of extensions."""
    own = os.environ.get(CACHE_ENV)
    if own:
        return Path(own).expanduser()
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()) / "ds_fp4"


def host_folder() -> Path:
    """A folder of this user on this host, for when `folder()` cannot be used."""
    path = Path(tempfile.gettempdir()) / f"ds_fp4-{os.getuid()}-{socket.gethostname()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        # Somebody else's, or open to others: code from there must not be loaded.
        return Path(tempfile.mkdtemp(prefix="ds_fp4-"))
    return path


def get(name: str, build: Callable[[Path], Path]) -> Path:
    """Path of the cached file `name`, built first if it is not there.

    Args:
        name: with a hash of everything the content depends on.
        build: makes the file somewhere in the folder it is given and returns its path; runs in one process at a time.

    Raises:
        BuildError: if the build fails here, or failed in another process while this one waited for it.
    """
    wanted = folder() / name
    if os.path.exists(wanted):
        return wanted
    try:
        return _get_in(wanted, build)
    except _Unusable as reason:
        local = host_folder() / name
        if not os.path.exists(local):
            notice = f"ds_fp4: {reason}; building in {local.parent} instead. Set {CACHE_ENV} to change that."
            print(notice, file=sys.stderr, flush=True)
        return local if os.path.exists(local) else _get_in(local, build)


def _get_in(wanted: Path, build: Callable[[Path], Path]) -> Path:
    failures = wanted.with_suffix(".failed")
    known_failure = _read(failures).get("id")
    with _locked(wanted) as published:
        if published:
            return wanted
        failure = _read(failures)
        if failure.get("id") != known_failure:
            builder = f"process {failure.get('pid')} on {failure.get('host')}"
            raise BuildError(f"the build by {builder} failed:\n{failure.get('error')}")
        _remove_stale_attempts(wanted)
        try:
            attempt = Path(tempfile.mkdtemp(prefix=f"{wanted.stem}.build-", dir=wanted.parent))
        except OSError as error:  # a lock file from before may be open to writing where its folder is not
            if error.errno in _NOT_WRITABLE:
                raise _Unusable(f"cannot write to {wanted.parent} ({error.strerror})") from error
            raise
        try:
            publish(build(attempt), wanted)
        except Exception as error:
            text = f"{error}" if isinstance(error, BuildError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(OSError):  # a full disk, say, must not hide why the build failed
                _write(failures, {"id": uuid.uuid4().hex, **_whoami(), "error": text})
            raise BuildError(text) from error
        finally:
            shutil.rmtree(attempt, ignore_errors=True)
        failures.unlink(missing_ok=True)
    return wanted


def publish(source: Path, wanted: Path) -> None:
    """Copy `source` to `wanted`, which is never seen half written, not even after a crash."""
    handle, temporary = tempfile.mkstemp(prefix=f"{wanted.stem}.copy-", dir=wanted.parent)
    try:
        with os.fdopen(handle, "wb") as target, open(source, "rb") as content:
            shutil.copyfileobj(content, target)
            target.flush()
            os.fsync(target.fileno())
        os.chmod(temporary, 0o755)
        os.replace(temporary, wanted)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(wanted: Path) -> Iterator[bool]:
    """Holds the build lock of `wanted` and yields False; yields True, without a lock, once `wanted` is there."""
    import fcntl

    lock = wanted.with_suffix(".lock")
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno in _NOT_WRITABLE:
            raise _Unusable(f"cannot write to {wanted.parent} ({error.strerror})") from error
        raise
    try:
        start, noticed = time.monotonic(), False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno in _NO_FLOCK:
                    raise _Unusable(f"{wanted.parent} is on a file system without locks ({error.strerror})") from error
                raise
            if os.path.exists(wanted):
                yield True
                return
            if not noticed and time.monotonic() - start >= NOTICE_AFTER_S:
                noticed = True
                holder = _read(lock)
                builder = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
                print(f"ds_fp4: waiting for {builder}, which builds {wanted}", file=sys.stderr, flush=True)
            time.sleep(POLL_S)
        if os.path.exists(wanted):
            yield True
            return
        with contextlib.suppress(OSError):  # only for the notice above
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_whoami()).encode(), 0)
        yield False
    finally:
        # Frees the lock. The file stays: were it removed, two processes could hold locks on two files of that name.
        os.close(descriptor)


def _whoami() -> dict[str, object]:
    return {"host": socket.gethostname(), "pid": os.getpid()}


def _read(path: Path) -> dict[str, object]:
    """A small JSON file; empty if it is not there or not whole."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: dict[str, object]) -> None:
    temporary = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, path)


def _remove_stale_attempts(wanted: Path) -> None:
    for attempt in wanted.parent.glob(f"{wanted.stem}.build-*"):
        with contextlib.suppress(OSError):
            if time.time() - attempt.stat().st_mtime > STALE_AFTER_S:
                shutil.rmtree(attempt, ignore_errors=True)
