"""BatchView: everything an attention plan may read about one step. Leaf module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import torch


@dataclass(slots=True)
class HostArgs:
    """Exact host integers of a step, given to every graph replay. CUDA and XPU ignore them; ACL and CPU need them."""

    seq_lens: np.ndarray  # [B] int32
    query_start_loc: np.ndarray  # [B+1] int32


@dataclass(slots=True)
class BatchView:
    """One step's batch. B requests, T tokens; decode requests (one query token) come first.

    Device tensors and exact host arrays hold the same numbers. When the step is padded for a graph, rows from
    `num_reqs` on have seq_len 1 and the dummy block, tokens from `num_tokens` on have slot -1.
    Lists have one entry for each KV group.
    """

    num_reqs: int
    num_tokens: int
    num_decode_reqs: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # [B+1] int32
    seq_lens: torch.Tensor  # [B] int32: context including this step's tokens
    block_tables: list[torch.Tensor]  # a group: [B, P] int32, P covers max_seq_len
    slot_mappings: list[torch.Tensor]  # a group: [T] int64 = block * block_size + offset; -1 skips
    query_start_loc_host: np.ndarray
    seq_lens_host: np.ndarray
    block_tables_host: Mapping[int, np.ndarray] | Sequence[np.ndarray]  # read when it is planned
    block_size: int

    def host_args(self) -> HostArgs:
        return HostArgs(self.seq_lens_host, self.query_start_loc_host)
