"""The native kernel library seen from Python: which build fits this CPU, its structs, its thread pool, its tapes.

The library (platforms/cpu/native/) has a C interface and knows nothing of torch, so one build serves every release.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.platforms.cpu.builds import native_build
from headrace.platforms.cpu.numa import Placement
from headrace.platforms.cpu.packed_weights import PackedWeights
from headrace.platforms.graph import OpTime

ABI_VERSION = 9
_PACK_BYTES, _ROWS = (
    1 << 23,
    256,
)  # stored rows packed at once: about so many bytes, a multiple of so many
_READ_BYTES = 1 << 28  # more than the caches hold
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}

# GGUF block types the library computes on, and the codes of all storages (abi.h, hr_format)
FORMATS = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 4,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
}
OPS = (
    "rms_norm", "linear", "rotary", "glu", "embedding", "kv_write", "attention", "sample", "route", "experts",
    "logprobs",
)  # fmt: skip


def _struct(name: str, pointers: str, longs: str, ints: str, *tail: tuple[str, Any]) -> type:
    """A ctypes mirror of a struct of abi.h: pointers first, then int64, then int32 fields."""
    fields: list[tuple[str, Any]] = [(field, c_void_p) for field in pointers.split()]
    fields += [(field, c_int64) for field in longs.split()]
    fields += [(field, c_int32) for field in ints.split()]
    return type(name, (ctypes.Structure,), {"_fields_": [*fields, *tail]})


RmsNorm = _struct(
    "RmsNorm",
    "x residual weight y",
    "x_stride residual_stride y_stride",
    "rows inner hidden dtype",
    ("eps", c_float),
)
Linear = _struct(
    "Linear",
    "x packed bias y scratch",
    "x_stride y_stride",
    "rows k n format x_dtype y_dtype",
    ("softcap", c_float),
    ("prompt", c_int32),
)
Rotary = _struct(
    "Rotary",
    "q k positions cos_sin q_norm k_norm",
    "q_stride k_stride",
    "rows q_heads k_heads head_dim rotary_dim is_neox dtype",
    ("eps", c_float),
)
Glu = _struct("Glu", "x y", "x_stride y_stride", "rows n act dtype")
Embedding = _struct(
    "Embedding",
    "ids packed y",
    "y_stride",
    "rows hidden vocab format dtype",
    ("scale", c_float),
)
KvWrite = _struct(
    "KvWrite",
    "k v k_cache v_cache slots",
    "k_stride v_stride block_stride",
    "rows kv_heads head_dim block_size dtype kv_dtype",
)
Attention = _struct(
    "Attention",
    "q k_cache v_cache out query_start_loc seq_lens block_table sinks scratch",
    "q_stride out_stride block_stride table_stride",
    "num_decode num_reqs q_heads kv_heads head_dim block_size dtype kv_dtype window splits prefill_tasks",
    ("prefill_list", c_void_p),
    ("scale", c_float),
    ("softcap", c_float),
)
Route = _struct("Route", "logits weights ids", "logits_stride", "rows experts top_k renormalize")
Experts = _struct(
    "Experts",
    "x weights ids w13 w2 y scratch",
    "x_stride y_stride",
    "rows top_k experts hidden intermediate format down_format act dtype",
)
Logprobs = _struct("Logprobs", "x ids own rank top top_ids", "x_stride", "rows n k")
Sample = _struct(
    "Sample", "x temperature top_k top_p min_p uniform ids", "x_stride", "rows n guarded"
)


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "hr_abi_version": (c_int32, ()),
        "hr_isa": (c_char_p, ()),
        "hr_pool_new": (c_void_p, (c_int32,)),
        "hr_pool_free": (None, (c_void_p,)),
        "hr_run": (c_int32, (c_void_p, c_int32, c_void_p)),
        "hr_tape_new": (c_void_p, ()),
        "hr_tape_free": (None, (c_void_p,)),
        "hr_tape_add": (c_int32, (c_void_p, c_void_p, c_int32, c_void_p)),
        "hr_tape_run": (c_int32, (c_void_p, c_void_p)),
        "hr_tape_profile": (
            c_int32,
            (c_void_p, c_void_p, POINTER(c_int32), POINTER(c_int64), c_int32),
        ),
        "hr_packed_bytes": (c_int64, (c_int32, c_int64, c_int64)),
        "hr_pack": (
            c_int32,
            (c_void_p, c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64),
        ),
        "hr_read": (c_int64, (c_void_p, c_void_p, c_int64)),
        "hr_checksum": (c_uint64, (c_void_p, c_void_p, c_int64)),
        "hr_linear_scratch": (c_int64, (c_int32, c_int32, c_int32)),
        "hr_attention_scratch": (c_int64, (c_void_p,)),
        "hr_experts_scratch": (c_int64, (c_void_p,)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.hr_abi_version() != ABI_VERSION:
        raise OSError(f"{path.name} was built for another version of headrace; reinstall headrace")
    return library


class Arena:
    """Memory of fixed address for captured steps. A piece is given again once nothing refers to it: a tape runs in
    order, so what died before an op was recorded is free when the op is replayed."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []  # uint8, each 64-byte aligned
        self._held: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        nbytes = max(count * dtype.itemsize, 64)
        fitting = [i for i, piece in enumerate(self._free) if piece.nbytes >= nbytes]
        best = min(fitting, key=lambda i: self._free[i].nbytes, default=None)
        if best is not None and self._free[best].nbytes <= 4 * nbytes:
            piece = self._free.pop(best)
        else:
            piece = aligned_bytes(nbytes)
            self._held.append(piece)
        lease = piece[:nbytes].view(_Lease)
        # torch keeps `lease` alive as long as any view of the storage lives
        weakref.finalize(lease, self._free.append, piece).atexit = False
        return torch.from_numpy(lease)[: count * dtype.itemsize].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._held)


class _Lease(np.ndarray):
    """An array that can be watched (plain arrays cannot be told apart from their views)."""


def aligned_bytes(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] at a multiple of 64, zeroed, untouched until written."""
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


class Slabs:
    """Memory for packed weights, cut from large pieces: numpy asks for huge pages for those (a decode step reads every
    weight once, and with small pages most of the time would go into finding them). Never given back one by one."""

    SIZE = 32 << 20

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._piece = np.empty(0, np.uint8)
        self._used = 0
        self._lock = threading.Lock()  # weights are loaded by several threads

    @property
    def nodes(self) -> list[int]:
        return self._placement.nodes

    def take(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], 64-byte aligned, zeroed."""
        with self._lock:
            if self._used + nbytes > self._piece.nbytes:
                if nbytes > self.SIZE // 2:
                    return self._new(nbytes)
                self._piece, self._used = self._new(self.SIZE), 0
            start = self._used
            self._used = start + nbytes + -nbytes % 64
            return self._piece[start : start + nbytes]

    def _new(self, nbytes: int) -> np.ndarray:
        memory = aligned_bytes(nbytes)
        self._placement.spread(memory)
        return memory


class Tape:
    """Recorded native calls, replayed by one call into the library."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._tape = kernels.library.hr_tape_new()
        weakref.finalize(self, kernels.library.hr_tape_free, self._tape).atexit = False
        self.keep: list[Any] = []  # what the recorded pointers point at and nobody else may hold
        self._said: list[tuple[str, str, int]] = []  # of each op: name, sizes, bytes of weights
        self._steps: list[int] = []  # the op that each of the library's steps belongs to

    def add(self, op: int, args: ctypes.Structure) -> None:
        steps = self._kernels.library.hr_tape_add(self._tape, self._kernels.pool, op, byref(args))
        if steps < 0:
            raise ValueError(f"the native library refused {OPS[op]} with these arguments")
        self._steps += [len(self._said)] * steps
        self._said.append((OPS[op], *self._kernels.describe(op, args)))

    def run(self) -> None:
        self._kernels.library.hr_tape_run(self._kernels.pool, self._tape)

    def profile(self) -> list[OpTime]:
        """What each recorded op took, run one by one."""
        most = len(self._steps)
        ops, times = (c_int32 * most)(), (c_int64 * most)()
        self._kernels.library.hr_tape_profile(self._kernels.pool, self._tape, ops, times, most)
        seconds = [0.0] * len(self._said)
        for owner, nanoseconds in zip(self._steps, times, strict=True):
            seconds[owner] += nanoseconds * 1e-9
        return [OpTime(*said, took) for said, took in zip(self._said, seconds, strict=True)]


class Kernels:
    """The library with its thread pool. One for each worker; calls come from one thread at a time."""

    def __init__(self, features: frozenset[str], threads: int) -> None:
        path = native_build(features)
        if path is None:
            raise OSError("the native kernels were not built; see `headrace doctor`")
        self.library = _open(path)
        self._build = path
        self.store: PackedWeights | None = None  # while weights are loaded that are kept on disk
        self.isa = self.library.hr_isa().decode()
        self.threads = threads
        pool = self.library.hr_pool_new(threads)
        if not pool:
            raise OSError(f"the {self.isa} kernels could not start on this machine")
        self.pool = c_void_p(pool)
        weakref.finalize(self, self.library.hr_pool_free, self.pool).atexit = False
        self.tape: Tape | None = None  # set while a step is captured
        self.arena: Arena | None = None
        self._scratch: dict[str, np.ndarray] = {}
        self._weights = Slabs(Placement.here())

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result: of fixed address during a capture."""
        if self.arena is not None:
            return self.arena.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def scratch(self, name: str, nbytes: int) -> int:
        """Address of memory that an op needs while it runs; shared by all ops of that name, grown as needed."""
        if nbytes <= 0:
            return 0
        if self.tape is not None:  # a tape keeps the address: give it memory of its own
            piece = aligned_bytes(nbytes)
            self.tape.keep.append(piece)
            return int(piece.ctypes.data)
        held = self._scratch.get(name)
        if held is None or held.nbytes < nbytes:
            held = self._scratch[name] = aligned_bytes(nbytes)
        return int(held.ctypes.data)

    def run(self, op: int, args: ctypes.Structure) -> None:
        """Run now, or record when a step is being captured."""
        if self.tape is not None:
            self.tape.add(op, args)
        elif self.library.hr_run(self.pool, op, byref(args)) < 0:
            raise ValueError(f"the native library refused {OPS[op]} with these arguments")

    def describe(self, op: int, args: Any) -> tuple[str, int]:
        """Sizes and storage of a call in words, and the bytes of weights that it reads."""
        name = OPS[op]
        if name == "linear":
            scheme = next(known for known, code in FORMATS.items() if code == args.format)
            nbytes = self.library.hr_packed_bytes(args.format, args.n, args.k)
            return f"{args.k}x{args.n} {scheme}", nbytes
        if name == "experts":
            used = min(args.rows * args.top_k, args.experts)
            nbytes = self.library.hr_packed_bytes
            gate_up = nbytes(args.format, 2 * args.intermediate, args.hidden)
            down = nbytes(args.down_format, args.hidden, args.intermediate)
            detail = f"{args.top_k} of {args.experts}, {args.hidden}x{args.intermediate}"
            return detail, used * (gate_up + down)
        if name == "attention":
            return f"{args.q_heads}/{args.kv_heads} heads of {args.head_dim}", 0
        return "", 0

    def read_bandwidth(self) -> float:
        """Bytes a second that the threads together read from memory that no cache holds: the best of three passes."""
        memory = np.ones(_READ_BYTES, np.uint8)
        passes = (
            self.library.hr_read(self.pool, memory.ctypes.data, memory.nbytes) for _ in range(3)
        )
        return memory.nbytes / max(min(passes), 1) * 1e9

    def packed_weights(self, path: Path, identity: str) -> PackedWeights:
        """What to set as `store` to take packed matrices from this file; good for this build alone."""
        build = self._build.stat()
        mine = f"{self.isa} {ABI_VERSION} {build.st_size} {build.st_mtime_ns}"
        return PackedWeights(path, f"{mine} {identity}", self._checksum)

    def _checksum(self, data: np.ndarray) -> int:
        return int(self.library.hr_checksum(self.pool, data.ctypes.data, data.nbytes))

    def kept(
        self, name: str, scheme: str, rows: int, k: int, stored: Callable[[], np.ndarray]
    ) -> torch.Tensor:
        """`pack` of what `stored` reads, from the store if it has it."""
        store = self.store
        if store is None:
            return self.pack(scheme, stored(), rows, k)
        key = f"{name} {scheme} {rows}x{k}"
        found = store.find(key, self.library.hr_packed_bytes(FORMATS[scheme], rows, k))
        if found is None:
            packed = self.pack(scheme, stored(), rows, k)
            store.add(key, packed.numpy())
            return packed
        if len(self._weights.nodes) > 1:  # pages of the file lie where they were read first
            memory = self._weights.take(found.nbytes)
            memory[:] = found
            found = memory
        return torch.from_numpy(found)

    def pack(self, scheme: str, source: np.ndarray, rows: int, k: int) -> torch.Tensor:
        """source: uint8 [rows, bytes of a stored row] -> the library's panels, uint8, 64-byte aligned."""
        code = FORMATS[scheme]
        packed = self._weights.take(self.library.hr_packed_bytes(code, rows, k))
        drop = getattr(source, "drop", None)  # see platforms/linear.py
        step = max(_PACK_BYTES // source.shape[1] // _ROWS, 1) * _ROWS
        for first in range(0, rows, step):
            part = np.ascontiguousarray(source[first : first + step])
            status = self.library.hr_pack(
                self.pool, code, part.ctypes.data, part.shape[1], packed.ctypes.data, len(part), k, first
            )  # fmt: skip
            if status < 0:
                raise ValueError(f"{scheme} weights of {k} columns cannot be packed")
            if drop is not None:
                drop(first, first + len(part))
        return torch.from_numpy(packed)
