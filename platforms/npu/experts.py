"""Mixture of experts as a chain of torch_npu's ops. Contracts: headrace.platforms.ops and headrace.platforms.linear.

Tokens are sorted by expert, all experts' rows are multiplied in one grouped product, and each token's results are put
back and added up.

Sources: torch_npu's documentation of npu_moe_gating_top_k_softmax, npu_moe_init_routing_v2, npu_grouped_matmul,
npu_swiglu and npu_moe_finalize_routing.
"""

from __future__ import annotations

import torch

from headrace.platforms.device import DeviceRuntime
from headrace.platforms.linear import ExpertsImpl
from headrace.platforms.queries import RouterQuery

Packed = tuple[torch.Tensor, torch.Tensor]

COUNTS = 1  # of expert_tokens_num_type and group_list_type: tokens of each expert, not summed up


class GatingTopKSoftmax:
    def __init__(self, query: RouterQuery, runtime: DeviceRuntime) -> None:
        pass

    def __call__(
        self, logits: torch.Tensor, top_k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(
            logits.contiguous(), None, top_k
        )
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, ids


class GroupedExperts(ExpertsImpl):
    def pack(self, w13: torch.Tensor, w2: torch.Tensor) -> Packed:
        """[E, H, 2 * I] and [E, I, H]: the grouped product multiplies from the right."""
        dtype = getattr(torch, self.query.dtype)
        up, down = (w.to(dtype).transpose(1, 2).contiguous() for w in (w13, w2))
        return up, down

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: Packed
    ) -> torch.Tensor:
        tokens, top_k = ids.shape
        if not tokens:
            return torch.empty_like(x)
        experts = self.query.experts
        rows, places, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
            x.contiguous(),
            ids.contiguous(),
            active_num=tokens * top_k,
            expert_num=experts,
            expert_tokens_num_type=COUNTS,
            expert_tokens_num_flag=True,
            active_expert_range=[0, experts],
        )
        hidden = torch.ops.npu.npu_swiglu(grouped(rows, packed[0], counts), -1)
        results = grouped(hidden, packed[1], counts)
        # the sum asks for the places of all tokens' first choices, then of their second ones; float32, as it is taken
        order = places.view(tokens, top_k).t().contiguous().view(-1)
        total: torch.Tensor = torch.ops.npu.npu_moe_finalize_routing(
            results.float(), None, None, None, weights.contiguous(), order, None
        )
        return total.to(x.dtype)


def grouped(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The first counts[0] rows of x times weight[0], the next counts[1] times weight[1], ..."""
    y: torch.Tensor = torch.ops.npu.npu_grouped_matmul(
        [x],
        [weight],
        group_list=counts,
        split_item=2,  # one result
        group_type=0,  # groups of rows
        group_list_type=COUNTS,
    )[0]
    return y
