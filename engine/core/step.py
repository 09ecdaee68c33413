"""StepPlan and StepResult: what the scheduler tells the workers and what rank 0 answers. Torch-free, numpy only.

A request has a permanent row in the workers while it runs. Workers keep, for each row, the token pool
[rows, max_model_len], the block tables and the sampling state; a plan carries differences only. The token sampled
for a row is written to the row's token pool on the device, so a plan may name a position whose token the host does
not know yet (overlap of scheduling and execution).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from headrace.engine.core.sampling import SamplingParams

SCHEMA_VERSION = 2  # exchanged in hello: a stale worker cannot attach


class NewRow(msgspec.Struct, frozen=True):
    """A request that starts (or restarts after preemption) in a row, sent in full once."""

    row: int
    request_id: str
    token_ids: bytes  # int32 little-endian: prompt, and outputs so far after a preemption
    prompt_len: int
    sampling: SamplingParams
    adapter_id: int = 0


class StepPlan(msgspec.Struct):
    """One step. B scheduled requests: first those with exactly one query token that samples, then the others.

    `num_computed[i]` tokens of row `rows[i]` are in the KV cache before the step; the step computes the next
    `num_new[i]`. `sample[i]`: the chunk reaches the last known position, so a token is sampled at
    position num_computed + num_new. Arrays are numpy int32 in process, bytes on the wire (encode/decode below).
    """

    step_id: int
    rows: np.ndarray  # [B] int32
    num_computed: np.ndarray  # [B] int32
    num_new: np.ndarray  # [B] int32
    sample: np.ndarray  # [B] bool
    num_decode: int
    new_rows: list[NewRow]
    # Block table changes in order of application: table[group, row, index] = block.
    block_updates: np.ndarray  # [N, 4] int32: group, row, index, block

    @property
    def num_tokens(self) -> int:
        return int(self.num_new.sum())


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the token itself and the likeliest ones, best first.

    Taken from the log-softmax of the raw logits (before temperature, penalties and bias).
    """

    token_id: int
    logprob: float
    rank: int  # 1 = the likeliest
    top_ids: list[int]
    top_logprobs: list[float]


class StepResult(msgspec.Struct):
    """Rank 0's answer to a plan: sampled ids in the plan's order, -1 where nothing was sampled."""

    step_id: int
    token_ids: np.ndarray  # [B] int32
    logprobs: dict[
        int, TokenLogprobs
    ]  # index in the plan -> its sampled token's logprobs, where asked
    # index in the plan -> one entry a prompt position of this chunk whose next token is a prompt token:
    # entry j is about prompt token num_computed + j + 1
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    nan_rows: list[int]  # indices in the plan whose logits were not finite
    device_ms: float = 0.0
    error: str = ""  # the step failed as a whole; `retry` says whether a smaller step may pass
    retry: bool = False
    graphs: int = 0  # captured so far


_PLAN_ARRAYS = (
    ("rows", np.int32),
    ("num_computed", np.int32),
    ("num_new", np.int32),
    ("sample", np.bool_),
    ("block_updates", np.int32),
)


def _enc_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).tobytes()
    raise TypeError(f"cannot encode {type(value).__name__}")


class _WirePlan(msgspec.Struct):
    step_id: int
    rows: bytes
    num_computed: bytes
    num_new: bytes
    sample: bytes
    num_decode: int
    new_rows: list[NewRow]
    block_updates: bytes


class _WireResult(msgspec.Struct):
    step_id: int
    token_ids: bytes
    logprobs: dict[int, TokenLogprobs]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    nan_rows: list[int]
    device_ms: float = 0.0
    error: str = ""
    retry: bool = False
    graphs: int = 0


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_plan_decoder = msgspec.msgpack.Decoder(_WirePlan)
_result_decoder = msgspec.msgpack.Decoder(_WireResult)


def encode(message: StepPlan | StepResult) -> bytes:
    return _encoder.encode(message)


def decode_plan(data: bytes | memoryview) -> StepPlan:
    wire = _plan_decoder.decode(data)
    arrays = {name: np.frombuffer(getattr(wire, name), dtype) for name, dtype in _PLAN_ARRAYS}
    arrays["block_updates"] = arrays["block_updates"].reshape(-1, 4)
    return StepPlan(
        step_id=wire.step_id, num_decode=wire.num_decode, new_rows=wire.new_rows, **arrays
    )


def decode_result(data: bytes | memoryview) -> StepResult:
    wire = _result_decoder.decode(data)
    fields = {name: getattr(wire, name) for name in wire.__struct_fields__ if name != "token_ids"}
    return StepResult(token_ids=np.frombuffer(wire.token_ids, np.int32), **fields)
