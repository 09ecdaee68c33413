"""Starting the engine process, and the handle its parent keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping

from headrace.engine.config.env import child_environment
from headrace.engine.config.settings import EngineConfig
from headrace.engine.core.boot import Boot, write_boot
from headrace.engine.core.stop import STOP_SIGNAL
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.source import ModelFiles
from headrace.platforms.device import DeviceInfo
from headrace.platforms.probe import load_platform

# Unix socket paths end at 107 bytes; a longer temporary folder gives way to /tmp.
_MAX_FOLDER = 80


class EngineProcess:
    """A running engine process. It ends when this process does, however that happens.

    `fileno` is readable once it has ended, so that an event loop can wait for that.
    """

    def __init__(self, popen: subprocess.Popen[bytes], address: str) -> None:
        self._popen = popen
        self.address = address  # ZeroMQ endpoint
        self._ended = threading.Event()
        self._read_fd, self._write_fd = os.pipe()
        # A thread that waits works on every system and costs nothing; polling would do neither.
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self._popen.wait()
        self._ended.set()
        with contextlib.suppress(OSError):
            os.write(self._write_fd, b"x")

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._popen.returncode if self._ended.is_set() else None

    def fileno(self) -> int:
        return self._read_fd

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code, or None when `timeout` seconds pass first."""
        self._ended.wait(timeout)
        return self.exit_code

    def terminate(self) -> None:
        """Ask for an orderly stop."""
        if not self._ended.is_set():
            self._popen.send_signal(STOP_SIGNAL)

    def kill(self) -> None:
        if not self._ended.is_set():
            self._popen.kill()

    def stop(self, timeout: float = 10.0) -> int:
        """Terminate, kill what is still there after `timeout` seconds; the exit code."""
        self.terminate()
        if self.wait(timeout) is None:
            self.kill()
        code = self.wait()
        assert code is not None
        return code


def launch_engine(
    config: EngineConfig,
    files: ModelFiles,
    device: DeviceInfo,
    *,
    spec: ModelSpec | None = None,
    environment: Mapping[str, str] | None = None,
    executor: str = "",
) -> EngineProcess:
    """Start the engine process for a model and a device; returns at once. Standard error is inherited.

    `spec` saves reading the files again. `executor` names another factory of workers, "module:function".
    `environment` is put over this process's own and over what the platform wants. PlatformError when the device's
    platform is not installed.
    """
    wanted = {} if executor else _worker_environment(config, device)
    folder = _private_folder()
    address = f"ipc://{folder}/engine"
    read_fd, write_fd = os.pipe()
    # -m puts the current folder on the path: a stray numpy.py there must not be imported.
    child = child_environment(**{"PYTHONSAFEPATH": "1", **wanted, **(environment or {})})
    command = [sys.executable, "-m", "headrace.engine.core.process", "--boot-fd", str(read_fd)]
    try:
        # A session of its own: a terminal's Ctrl-C is for the API process, even before the engine could ignore it.
        popen = subprocess.Popen(
            command,
            env=child,
            pass_fds=(read_fd,),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        os.close(write_fd)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(read_fd)
    process = EngineProcess(popen, address)
    weakref.finalize(process, _clean_up, folder, write_fd)
    with contextlib.suppress(BrokenPipeError):  # it ended already: whoever waits for it sees that
        write_boot(write_fd, Boot(address, config, files, device, spec, executor))
    return process


def _worker_environment(config: EngineConfig, device: DeviceInfo) -> Mapping[str, str]:
    """What a worker that lives in the engine process wants there; workers of their own get it from their executor."""
    settings = config.device
    if settings.worker == "process" or settings.tensor_parallel_size > 1:
        return {}
    if settings.threads:
        device = dataclasses.replace(device, units=settings.threads)
    return load_platform(device.platform).worker_env(device, 0, 1)


def _clean_up(folder: str, boot_fd: int) -> None:
    """At the end of this process at the latest. The engine, if it still runs, sees its pipe end and ends."""
    with contextlib.suppress(OSError):
        os.close(boot_fd)
    shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> str:
    """A new folder that only this user may enter."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(
        prefix="headrace-", dir=parent if len(parent) <= _MAX_FOLDER else "/tmp"
    )
