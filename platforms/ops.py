"""Op contracts and `Ops`, which binds each op once, at load: layers hold plain callables, nothing is dispatched later.

Conventions shared by all ops. T tokens, H hidden, I intermediate, Hq/Hkv heads, D head size, V vocabulary, R rows.
Activations are float32, bfloat16 or float16; unless a contract says otherwise, an op computes in float32 and rounds
once to the dtype of its first input. Torch is imported only when an op is bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from headrace.platforms import tuned
from headrace.platforms.device import DeviceInfo, DeviceRuntime
from headrace.platforms.registry import (
    REFERENCE,
    Decision,
    Implementation,
    Policy,
    Registry,
    SelectionError,
    SelectionReport,
    SelfTest,
    load_target,
    select,
)

if TYPE_CHECKING:
    import torch

_COMPARE = "headrace.platforms.reference.compare:compare"

# (relative, absolute): |got - want| <= absolute + relative * |want|
Tolerance = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Case:
    """One generated input of a contract: `run` feeds it to a bound op and returns the tensors to compare."""

    name: str
    run: Callable[[Any], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class OpContract:
    """What every implementation of an op must do. `doc` states signature, shapes and conventions.

    Function ops are called as written in `doc`; class ops are made once per query as `cls(query, runtime)`.
    `cases` names a generator `(query, device: torch.device, seed: int) -> list[Case]`; the results of an
    implementation and of the reference must agree within `tolerance[dtype]` (integers exactly).
    """

    name: str
    kind: Literal["function", "class"]
    doc: str
    cases: str
    tolerance: Mapping[str, Tolerance]
    # fields of the query that a self-test may make smaller, with their upper limits
    shrink: Mapping[str, int] = field(default_factory=dict)
    # schemes in which the cases draw weights as a file stores them, so that the reference can have them plain
    stored: tuple[str, ...] = ()


_ELEMENTWISE: Mapping[str, Tolerance] = {
    "float32": (1e-5, 1e-5),
    "bfloat16": (1.6e-2, 1e-3),  # two roundings where the contract has one
    "float16": (2e-3, 1e-4),
}
_REDUCTION: Mapping[str, Tolerance] = {
    "float32": (1e-4, 1e-4),
    "bfloat16": (2e-2, 2e-2),
    "float16": (4e-3, 4e-3),
}
_EXACT: Mapping[str, Tolerance] = dict.fromkeys(("float32", "bfloat16", "float16"), (0.0, 0.0))
# logits are float32 whatever the model computes in
_LOGITS: Mapping[str, Tolerance] = dict.fromkeys(_EXACT, (1e-5, 1e-5))


def _contract(
    name: str,
    doc: str,
    tolerance: Mapping[str, Tolerance] = _ELEMENTWISE,
    kind: Literal["function", "class"] = "function",
    shrink: Mapping[str, int] | None = None,
    cases: str = "",
    stored: tuple[str, ...] = (),
) -> OpContract:
    target = f"headrace.platforms.reference.cases:{cases or name}"
    return OpContract(name, kind, doc, target, tolerance, shrink or {}, stored)


CONTRACTS: Mapping[str, OpContract] = {
    contract.name: contract
    for contract in (
        _contract(
            "linear",
            """LinearImpl, selected by LinearQuery: y[T, out] = x[T, in] @ w[out, in]^T (+ bias). Float32 sums.""",
            _REDUCTION,
            "class",
            {"in_features": 1024, "out_features": 512},
            stored=("Q4_0",),
        ),
        _contract(
            "embedding",
            """EmbeddingImpl, selected by EmbeddingQuery: rows of w[V, H] * scale for ids[T] int32 or int64.""",
            _EXACT,
            "class",
            {"vocab": 512},
        ),
        _contract(
            "topk_softmax",
            """(logits[T, E] float32, top_k, renormalize: bool[, bias[E] float32]) -> (weights[T, K] float32,
            ids[T, K] int32).

            Selected by RouterQuery, which has the other options. Scores: softmax over all E, or the sigmoid of each.
            ids: the K experts with the largest scores, best first, the lower id among equals; weights: their scores,
            divided by the sum of the K if renormalize, times the query's scale. With a bias, which is given if the
            query has one, experts are chosen by score + bias; weights are scores still. With groups, experts come from
            the top_groups groups (of E / groups neighbours) with the largest score, or with a bias the largest sum of
            the two largest score + bias; the lower group among equals. A row with NaN gives some unlike ids within
            [0, E).""",
            _REDUCTION,
        ),
        _contract(
            "fused_experts",
            """ExpertsImpl (platforms/linear.py), selected by ExpertsQuery.""",
            _REDUCTION,
            "class",
            {"experts": 16, "top_k": 8, "hidden": 512, "intermediate": 256},
        ),
        _contract(
            "paged_attention",
            "PagedAttention (platforms/attention.py), selected by AttentionQuery.",
            _REDUCTION,
            "class",
            {"window": 24},  # a window that the generated contexts exceed, or none
        ),
        _contract(
            "rms_norm",
            """(x[..., H], weight[H] float32 or x's dtype, eps) -> [..., H], selected by NormQuery.

            x * rsqrt(mean(x^2) + eps) * weight over the last axis (QK norm passes [T, heads, D]). x is kept.""",
        ),
        _contract(
            "fused_add_rms_norm",
            """(x[T, H], residual[T, H], weight[H], eps) -> (normed, new_residual), selected by NormQuery.

            new_residual = x + residual rounded to their dtype; normed = rms_norm(new_residual). Both inputs are
            given up: an implementation may write into them or return them.""",
        ),
        _contract(
            "rotary_embedding",
            """(positions[T] int64, q[T, Hq, D], k[T, Hkv, D], cos_sin[L, R] float32, is_neox: bool) -> None.

            In place on q and k, which may be strided views: heads of a token lie one behind the other, tokens apart.
            Selected by RotaryQuery. R = rotary_dim <= D, even; the rest of a head is untouched. cos_sin holds R/2
            cosines, then R/2 sines. With c, s of a position and pairs (a, b): a' = a*c - b*s, b' = b*c + a*s; a pair
            is (i, i + R/2) if is_neox, else (2i, 2i + 1).""",
        ),
        *(
            _contract(
                op,
                f"(x[T, 2I]) -> [T, I]: {form}(x[:, :I]) * x[:, I:]. Selected by ActivationQuery.",
                cases="gated_activation",
            )
            for op, form in (
                ("silu_and_mul", "silu"),
                ("gelu_and_mul", "gelu by the error function"),
                ("gelu_tanh_and_mul", "gelu in its tanh form"),
            )
        ),
        _contract(
            "sample",
            """(logits[R, V] float32, temperature[R], top_k[R] int32, top_p[R], min_p[R], uniform[R]) -> ids[R] int64.

            Selected by SampleQuery; temperature, top_p, min_p and uniform are float32, uniform in [0, 1).
            temperature 0: the largest logit, lowest id among equals. Else, with p = softmax(logits / temperature):
            1. Order the vocabulary by falling logits / temperature, equal ones by rising id.
            2. Every filter keeps a prefix of that order and at least one token: top_k the first k (0 = off), top_p
               the shortest prefix with at least top_p of the mass that top_k left (1 = off), min_p the tokens with
               p >= min_p * max(p) (0 = off). The shortest prefix wins.
            3. The answer is the first token whose cumulative mass exceeds uniform * (mass of what is kept).
            Sums are float64 or as good, so one uniform number gives one token on every platform and in every batch.
            A row with NaN, or without any finite logit, gives some id within [0, V).
            An attribute `fast_greedy = True`: for rows of temperature 0 alone it is faster than PyTorch's argmax.
            An attribute `guarded`: a function of the same arguments and greedy: bool, true only if every temperature is
            0, -> ids[R] int32 that are -1 for rows with NaN or an infinite logit: no pass of its own for that.""",
            _EXACT,
            shrink={"vocab": 2048},
        ),
        _contract(
            "logprobs",
            """(logits[N, V] float32, ids[N] int64, k) -> (logprob[N], rank[N] int64, top_ids[N, k] int64, top[N, k]).

            Selected by SampleQuery; k <= V. logprob and top are log-softmax over V, float32; rank is one more than the
            number of larger logits; top holds the k largest, best first, of equal ones any. A row with NaN or without
            any finite logit gives anything.""",
            _LOGITS,
            shrink={"vocab": 2048},
        ),
        _contract(
            "penalties",
            """(logits[R, V] float32, tokens[P, L] int32, sequences[N, 4] int64, factors[N, 3] float32, longest: int).

            Selected by SampleQuery. Returns None, changes logits. A sequence is (row of logits, row of tokens, prompt,
            length): the first `length` of that row's tokens, of which the first `prompt` are the prompt. Rows of logits
            are unlike; longest >= all lengths. Factors: repetition, frequency, presence. A positive logit of a token in
            the sequence is divided by repetition, another multiplied with it; then frequency * (how often it is behind
            the prompt) and, if it is there at all, presence are subtracted.""",
            _LOGITS,
            shrink={"vocab": 2048},
        ),
        _contract(
            "token_bitmask",
            """(logits[R, V] float32, where[N] int64, allowed[N, ceil(V / 32)] int32) -> None, selected by SampleQuery.

            In place on rows `where` of logits, no two alike: -inf where bit t % 32 of word t // 32 is 0.""",
            _EXACT,
            shrink={"vocab": 2048},
        ),
    )
}


class Ops:
    """Binds ops for one device: select, load, test the unverified, record. One instance a worker.

    `bind` answers from a cache for equal (op, query), so layers with equal queries share an instance.
    """

    def __init__(
        self,
        registry: Registry,
        device: DeviceInfo,
        runtime: DeviceRuntime,
        policy: Policy | None = None,
        report: SelectionReport | None = None,
    ) -> None:
        self.registry = registry
        self.device = device
        self.runtime = runtime
        self.policy = policy or Policy()
        self.report = report if report is not None else SelectionReport()
        self._bound: dict[tuple[str, Any], Any] = {}

    def bind(self, op: str, query: Any) -> Any:
        """The function, or the instance made for the query. SelectionError when nothing can serve it."""
        key = (op, query)
        if key not in self._bound:
            contract = CONTRACTS[op]
            loaded: dict[str, Any] = {}

            def load(row: Implementation) -> None:
                loaded[row.name] = self._make(contract, row, query)

            decision: Decision = select(
                op,
                query,
                self.device,
                self.registry,
                self.policy,
                load=load,
                self_test=lambda row: self._self_test(contract, row, query),
                preferred=tuned.chosen(self.runtime.tuned, op, query),
            )
            self.report.decisions.append(decision)
            self._bound[key] = loaded[decision.chosen]
        return self._bound[key]

    @property
    def bound(self) -> Mapping[tuple[str, Any], Any]:
        """What was bound so far, by op and query."""
        return self._bound

    def can(self, op: str, query: Any) -> bool:
        """Whether `bind` would find an implementation that loads; nothing is recorded."""
        try:
            contract = CONTRACTS[op]
            select(
                op,
                query,
                self.device,
                self.registry,
                self.policy,
                load=lambda row: self._make(contract, row, query),
            )
        except SelectionError:
            return False
        return True

    def _make(self, contract: OpContract, row: Implementation, query: Any) -> Any:
        target = row.load()
        made = contract.kind == "class" or row.per_query
        return target(query, self.runtime) if made else target

    def _self_test(self, contract: OpContract, row: Implementation, query: Any) -> SelfTest:
        rows = {candidate.name: candidate for candidate in self.registry.candidates(row.op)}
        small = plain = shrunk(contract, query)
        if getattr(small, "scheme", "") in contract.stored:
            plain = replace(small, scheme="")
        reference = rows.get(REFERENCE)
        if reference is None or reference.supports(plain, self.device).status == "no":
            return SelfTest(False, "the reference cannot serve this query, so there is no truth")
        start = time.perf_counter()
        try:
            asked = (row, small), (reference, plain)
            instances = [self._make(contract, *made) for made in asked]
            error = load_target(_COMPARE)(contract, small, *instances, self.runtime.device)
        except Exception as failure:  # whatever an untried kernel throws is a failed test
            return SelfTest(False, f"{type(failure).__name__}: {failure}")
        took = time.perf_counter() - start
        if error.within:
            return SelfTest(True, f"largest error {error.largest:.1e}, {took:.2f} s")
        return SelfTest(False, f"{error.case}: largest error {error.largest:.1e}")


def shrunk(contract: OpContract, query: Any) -> Any:
    """The query with sizes that only cost time made smaller; head sizes, dtypes and options stay."""
    sizes = {name: min(getattr(query, name), most) for name, most in contract.shrink.items()}
    return replace(query, **sizes) if sizes else query
