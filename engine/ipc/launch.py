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

# What takes longest to import in an engine process whose worker lives there.
_WORKER = "headrace.engine.workers.serve"

# Unix socket paths end at 107 bytes; a longer temporary folder gives way to /tmp.
_MAX_FOLDER = 80


class EngineProcess:
    """A running engine process. It ends when this process does, however that happens.

    `fileno` is readable once it has ended, so that an event loop can wait for that.
    """

    def __init__(
        self, popen: subprocess.Popen[bytes], address: str, boot_fd: int, executor: str
    ) -> None:
        self._popen = popen
        self._boot_fd = boot_fd
        self._executor = executor
        self._booted = False
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

    def boot(
        self,
        config: EngineConfig,
        files: ModelFiles,
        device: DeviceInfo,
        spec: ModelSpec | None = None,
    ) -> None:
        """Say what to run; once. `spec` saves reading the files again."""
        self._booted = True
        boot = Boot(self.address, config, files, device, spec, self._executor)
        with contextlib.suppress(BrokenPipeError):  # it ended already: whoever waits sees that
            write_boot(self._boot_fd, boot)

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
        if not self._booted:  # it holds nothing yet, and importing may keep it from hearing
            self.kill()
        if self.wait(timeout) is None:
            self.kill()
        code = self.wait()
        assert code is not None
        return code


def start_engine(
    config: EngineConfig,
    device: DeviceInfo,
    *,
    environment: Mapping[str, str] | None = None,
    executor: str = "",
) -> EngineProcess:
    """Start an engine process for a device; returns at once. Standard error is inherited.

    It loads its libraries and waits for `boot`. Of `config` only the user's device settings are needed yet.
    `executor` names another factory of workers, "module:function". `environment` is put over this process's own and
    over what the platform wants. PlatformError when the device's platform is not installed.
    """
    inproc = not executor and _inproc(config)
    wanted = _worker_environment(config, device) if inproc else {}
    folder = _private_folder()
    address = f"ipc://{folder}/engine"
    read_fd, write_fd = os.pipe()
    # -m puts the current folder on the path: a stray numpy.py there must not be imported.
    child = child_environment(**{"PYTHONSAFEPATH": "1", **wanted, **(environment or {})})
    command = [sys.executable, "-m", "headrace.engine.core.process", "--boot-fd", str(read_fd)]
    if inproc:
        command += ["--preload", _WORKER]
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
    process = EngineProcess(popen, address, write_fd, executor)
    weakref.finalize(process, _clean_up, folder, write_fd)
    return process


def _inproc(config: EngineConfig) -> bool:
    """Whether the worker lives in the engine process; workers of their own are their executor's business."""
    return config.device.worker != "process" and config.device.tensor_parallel_size == 1


def _worker_environment(config: EngineConfig, device: DeviceInfo) -> Mapping[str, str]:
    """What a worker that lives in the engine process wants there."""
    if config.device.threads:
        device = dataclasses.replace(device, units=config.device.threads)
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
