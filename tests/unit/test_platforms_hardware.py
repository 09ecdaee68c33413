"""The CPU as this process sees it: machines described as small trees of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.engine.config.resolve import merge_defaults
from headrace.engine.config.settings import DeviceSettings, EngineConfig
from headrace.platforms.cpu import hardware
from headrace.platforms.cpu.hardware import Hardware, arch_of
from headrace.platforms.cpu.platform import CpuPlatform, describe_machine
from headrace.platforms.platform import ModelShape

GIB = 1 << 30
AVX2 = "fpu sse2 avx avx2 fma f16c"
AVX512 = AVX2 + " avx512f avx512bw avx512dq avx512vl avx512_vnni"


def machine(root: Path, files: dict[str, str], kind: str = "x86_64") -> Hardware:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Hardware(root, kind)


def cpuinfo(count: int, flags: str, threads: int = 1) -> str:
    return "\n\n".join(
        f"processor\t: {n}\nmodel name\t: Test CPU\nphysical id\t: 0\ncore id\t: {n // threads}\n"
        f"flags\t\t: {flags}"
        for n in range(count)
    )


def meminfo(total: float, available: float) -> str:
    kib = [int(value * GIB / 1024) for value in (total, available)]
    return f"MemTotal: {kib[0]} kB\nMemFree: 1 kB\nMemAvailable: {kib[1]} kB\n"


@pytest.mark.parametrize(
    ("flags", "arch"),
    [
        ("", "portable"),
        ("fpu sse2 avx", "portable"),
        (AVX2, "avx2"),
        (AVX2 + " avx512f", "avx2"),  # the first AVX-512 machines lack the parts that matter
        (AVX512, "avx512"),
        (AVX512 + " avx512_bf16", "avx512_bf16"),
        (AVX512 + " avx512_bf16 amx_tile amx_bf16 amx_int8", "amx"),
        (AVX512 + " amx_tile amx_int8", "avx512"),
        ("fp asimd evtstrm", "neon"),
        ("fp asimd asimddp i8mm", "neon_i8mm"),
        ("fp asimd asimddp i8mm bf16 sve", "neon_bf16"),
    ],
)
def test_arch(flags, arch):
    assert arch_of(frozenset(flags.split())) == arch


def test_every_described_arch_is_what_its_flags_say():
    """`describe` and `probe` speak of the same archs."""
    for arch in CpuPlatform.known_archs():
        device = CpuPlatform.describe(arch)
        native = bool(device.features & hardware.NATIVE_BF16)
        assert device.arch == arch and device.spec == "cpu:0"
        assert (
            (device.dtypes[0] == "bfloat16")
            == native
            == (arch in ("avx512_bf16", "amx", "neon_bf16"))
        )


def test_arm_cpuinfo(tmp_path):
    text = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp i8mm bf16\n"
    device = describe_machine(machine(tmp_path, {"proc/cpuinfo": text}, "aarch64"), {0})
    assert device.arch == "neon_bf16" and "dotprod" in device.features


def test_threads_of_one_core_count_once(tmp_path):
    files = {"proc/cpuinfo": cpuinfo(8, AVX2)}
    for n in range(8):
        path = f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list"
        files[path] = f"{n % 4},{n % 4 + 4}\n"
    found = machine(tmp_path, files)
    assert found.cores(set(range(8))).value == 4
    assert found.cores({0, 4}).value == 1  # both threads of one core
    assert found.cores({0, 1, 2}).value == 3


def test_cores_from_cpuinfo_alone(tmp_path):
    found = machine(tmp_path, {"proc/cpuinfo": cpuinfo(8, AVX2, threads=2)})
    assert found.cores(set(range(8))).value == 4


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("max 100000", 8), ("", 8)],
)
def test_cgroup_2_quota(tmp_path, quota, cores):
    files = {
        "proc/cpuinfo": cpuinfo(8, AVX2),
        "proc/self/cgroup": "0::/app/inner\n",
        "sys/fs/cgroup/app/cpu.max": quota,  # the parent's limit binds the child
        "sys/fs/cgroup/app/inner/cpu.max": "max 100000",
    }
    limit = machine(tmp_path, files).cores(set(range(8)))
    assert limit.value == cores
    assert ("control group" in limit.source) == (cores < 8)


def test_cgroup_1_quota_seen_from_a_container(tmp_path):
    """/proc/self/cgroup names the host's path; what is mounted here is only its end."""
    files = {
        "proc/cpuinfo": cpuinfo(8, AVX2),
        "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "proc/meminfo": meminfo(64, 60),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\n",
    }
    found = machine(tmp_path, files)
    assert found.cores(set(range(8))).value == 3
    assert found.total_memory().value == 4 * GIB
    assert found.free_memory().value == 2 * GIB  # file cache can be dropped


def test_cgroup_2_memory(tmp_path):
    files = {
        "proc/meminfo": meminfo(64, 60),
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": str(8 * GIB),
        "sys/fs/cgroup/a/memory.current": str(7 * GIB),
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {3 * GIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max",
    }
    found = machine(tmp_path, files)
    assert found.total_memory().value == 8 * GIB
    assert found.free_memory().value == 4 * GIB
    assert "control group" in found.free_memory().source


def test_no_limit_is_no_limit(tmp_path):
    files = {
        "proc/meminfo": meminfo(16, 10),
        "proc/self/cgroup": "3:memory:/\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    found = machine(tmp_path, files)
    assert found.total_memory().value == 16 * GIB
    assert found.free_memory().value == 10 * GIB


@pytest.mark.parametrize("kind", ["x86_64", "arm64", "riscv64", ""])
def test_a_machine_without_any_file(tmp_path, kind):
    """macOS, or a container that hides /proc: numbers are sane, nothing is raised."""
    found = Hardware(tmp_path, kind)
    device = describe_machine(found)
    assert device.units >= 1 and device.arch == ("neon" if kind == "arm64" else "portable")
    assert device.memory > 0 and 0 < found.free_memory().value <= device.memory
    assert device.name


@pytest.mark.parametrize(
    "junk", ["", "\n\n\n", "garbage", ":::\n: :\n", "\x00\xff", "MemTotal: x kB\n"]
)
def test_damaged_files(tmp_path, junk):
    names = (
        "proc/cpuinfo",
        "proc/meminfo",
        "proc/self/cgroup",
        "sys/fs/cgroup/cpu.max",
        "sys/fs/cgroup/memory.max",
        "sys/fs/cgroup/memory.current",
    )
    found = machine(tmp_path, dict.fromkeys(names, junk))
    device = describe_machine(found, {0, 1})
    assert device.units == 2 and device.memory > 0 and found.free_memory().value > 0


SHAPE = ModelShape("llama", 30, 576, 9, 3, 64, 49152, 135_000_000, "bfloat16", 8192)


def test_defaults_have_reasons_and_fit_the_machine():
    for arch in CpuPlatform.known_archs():
        device = CpuPlatform.describe(arch)
        defaults = CpuPlatform().defaults(SHAPE, device)
        assert all(default.reason for default in defaults.values())
        assert defaults["model.dtype"].value == device.dtypes[0]
        assert 0 < defaults["cache.kv_cache_memory"].value <= device.memory // 2


@pytest.mark.parametrize(
    ("threads", "world", "text"),
    [
        (0, 1, ""),
        (0, 8, ""),
        (8, 1, ""),
        (4, 2, ""),
        (9, 1, "9 threads exceed the 8 cores"),
        (5, 2, "2 workers of 5 threads exceed the 8 cores"),
        (0, 9, "9 workers share 8 cores"),
    ],
)
def test_threads_are_warned_of_where_the_user_asks_for_too_many(threads, world, text):
    platform, device = CpuPlatform(), CpuPlatform.describe("avx2")
    settings = DeviceSettings(threads=threads, tensor_parallel_size=world)
    config = EngineConfig(device=settings)
    config = merge_defaults(config, platform.defaults(SHAPE, device), "platform cpu")
    told = [problem.text for problem in platform.check(config, device)]
    told = [words for words in told if "cores" in words]
    assert len(told) == bool(text) and all(words.startswith(text) for words in told)


def test_worker_env_divides_the_cores():
    device = CpuPlatform.describe("avx2")
    for world, threads in ((1, 8), (2, 4), (3, 2), (16, 1)):
        env = CpuPlatform().worker_env(device, 0, world)
        assert env["OMP_NUM_THREADS"] == str(threads)
        assert env["OMP_WAIT_POLICY"] == "PASSIVE"


def test_this_machine():
    (device,) = CpuPlatform.probe()
    assert device.units >= 1 and device.memory > 1 << 28
    assert CpuPlatform.safe_probe
