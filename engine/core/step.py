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

SCHEMA_VERSION = 3  # exchanged in hello: a stale worker cannot attach


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
    position num_computed + num_new. Arrays are numpy in process; on the wire dtype, shape and bytes.
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


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
    # index in the plan -> its sampled token's logprobs, where asked
    logprobs: dict[int, TokenLogprobs]
    # index in the plan -> one entry a prompt position of this chunk whose next token is a prompt token:
    # entry j is about prompt token num_computed + j + 1
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    nan_rows: list[int]  # indices in the plan whose logits were not finite
    device_ms: float = 0.0
    error: str = ""  # the step failed as a whole; `retry` says whether a smaller step may pass
    retry: bool = False
    graphs: int = 0  # captured so far


def _enc_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _dec_hook(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_enc_hook).encode
decode_plan = msgspec.msgpack.Decoder(StepPlan, dec_hook=_dec_hook).decode
decode_result = msgspec.msgpack.Decoder(StepResult, dec_hook=_dec_hook).decode
