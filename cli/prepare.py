"""From what was typed to everything a start needs: settings, files, model description, device, problems. Torch-free.

All that can be known before weights are read is found here, so that mistakes end in one line within a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.cli.errors import CliError
from headrace.engine.config import env
from headrace.engine.config.resolve import (
    ConfigError,
    merge_defaults,
    source_of,
)
from headrace.engine.config.settings import PLATFORM, EngineConfig
from headrace.engine.models.registry import model_shape, selection_queries
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.experts import pieces
from headrace.engine.weights.gguf import GGUFFile
from headrace.engine.weights.gguf_names import ROPE_TENSORS, hf_name
from headrace.engine.weights.layout import tensor_shapes
from headrace.engine.weights.local import NoWeights
from headrace.engine.weights.online import (
    keeps_blocks,
    online_schemes,
    refuse_lost_blocks,
    refuse_without_kernel,
)
from headrace.engine.weights.source import ModelError, ModelFiles
from headrace.engine.weights.sources import read_spec, resolve_model
from headrace.platforms import tuned
from headrace.platforms.collectives import OP as COLLECTIVES
from headrace.platforms.device import DeviceInfo
from headrace.platforms.platform import Default
from headrace.platforms.probe import (
    ResolvedPlatform,
)
from headrace.platforms.queries import GroupQuery, SampleQuery
from headrace.platforms.registry import (
    Candidate,
    Decision,
    Policy,
    SelectionError,
    installed_version,
    policy_problems,
    select,
)

Progress = Callable[[float, float, str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """A start that should work as far as can be told without loading anything."""

    config: EngineConfig
    files: ModelFiles
    spec: ModelSpec
    found: ResolvedPlatform
    warnings: tuple[str, ...]

    @property
    def present(self) -> bool:
        """False: the device is described, not here."""
        part = self.config.device.device.partition(":")[2]
        return not part or part.isdigit()

    @property
    def device(self) -> DeviceInfo:
        return self.found.device

    @property
    def kv_dtype(self) -> str:
        chosen = self.config.cache.kv_cache_dtype
        return self.config.model.dtype if chosen == "auto" else chosen


def prepare(
    config: EngineConfig,
    found: ResolvedPlatform,
    progress: Progress | None = None,
    weightless: bool = False,
) -> Plan:
    """Everything up to the first weight, on the device that was found.

    `progress(done, total, text)` is called while a model is downloaded. `weightless`: a folder with a config.json alone
    will do. Raises CliError.
    """
    platform, device = found.platform, found.device
    notes: tuple[str, ...] = ()
    try:
        try:
            files = resolve_model(config.model, progress)
        except NoWeights as error:
            if not weightless:
                raise
            dummy = msgspec.structs.replace(config.model, load_format="dummy")
            files = resolve_model(dummy, progress)
            notes = (f"{str(error).partition(';')[0]}: this is what its config.json alone says",)
        spec = read_spec(files, config.model.hf_overrides)
        dtype = Default(device.dtypes[0], f"what {device.name} prefers")
        proposals = {"model.dtype": dtype, **platform.defaults(model_shape(spec), device)}
        config = merge_defaults(config, proposals, PLATFORM + platform.name)
    except (ModelError, ConfigError) as error:
        raise CliError(str(error)) from None
    asked = config.model.max_model_len
    if spec.max_position and asked > spec.max_position:
        row = source_of(config, "model.max_model_len")
        raise CliError(
            f"{row.source if row else 'max_model_len'}: {asked} tokens are more than the model's context of "
            f"{spec.max_position}; lower it"
        )
    problems = platform.check(config, device)
    errors = [problem.text for problem in problems if problem.level == "error"]
    if errors:
        raise CliError(errors[0], details="\n".join(errors[1:]))
    warnings = tuple(problem.text for problem in problems if problem.level == "warning")
    return Plan(config, files, spec, found, (*notes, *warnings))


def assumed_version(distribution: str) -> str:
    """The version installed here, or one that satisfies every lower bound."""
    return installed_version(distribution) or "9999"


def policy_of(plan: Plan) -> Policy:
    """What the settings say about selection."""
    device = plan.config.device
    return Policy(
        force=device.force,
        disable=frozenset(device.disable),
        only_verified=device.only_verified,
        self_test=device.self_test,
    )


def decide(plan: Plan) -> list[Decision]:
    """The choice for every op of the model, without loading an implementation. What was forced and cannot be ends
    with the table of candidates."""
    device, policy, registry = plan.config.device, policy_of(plan), plan.found.registry()
    problems = policy_problems(policy, registry)
    if problems:
        raise CliError(problems[0])

    # A device that is not here is explained as its machine would be set up: with the packages its kernels need.
    versions = installed_version if plan.present else assumed_version
    measured = tuned.read(env.tuned_file(plan.device.name), plan.device.name).options

    def choose(op: str, query: Any) -> Decision:
        faster = tuned.chosen(measured, op, query)
        return select(op, query, plan.device, registry, policy, versions=versions, preferred=faster)

    def can(op: str, query: Any) -> bool:
        try:
            choose(op, query)
        except SelectionError:
            return False
        return True

    dtype, world = plan.config.model.dtype, device.tensor_parallel_size
    try:
        queries = selection_queries(plan.spec, dtype, plan.kv_dtype, world, blocks(plan), can)
        asked, where = [query for _, query in queries], plan.device.spec
        refuse_without_kernel(plan.config.model.quantization, asked, where)
        refuse_lost_blocks(plan.config.model, _stored_blocks(plan), asked, where)
        seats = plan.config.scheduler.max_num_seqs
        query = SampleQuery(plan.spec.vocab, seats)
        queries += [(op, query) for op in ("sample", "logprobs", "penalties")]
        if world > 1:
            queries.append((COLLECTIVES, GroupQuery(world)))
        return [choose(op, query) for op, query in queries]
    except ModelError as error:
        raise CliError(str(error)) from None
    except SelectionError as error:
        raise CliError(str(error), details=_table(error.candidates)) from None


def blocks(plan: Plan) -> dict[str, str]:
    """Tensor -> quantization, for the tensors whose blocks the engine will try to compute with."""
    return online_schemes(
        tensor_shapes(plan.spec), _stored_blocks(plan), plan.config.model.quantization
    )


def _stored_blocks(plan: Plan) -> dict[str, str]:
    settings = plan.config.model
    kept = keeps_blocks(settings, settings.dtype, plan.device.dtypes[0])
    if plan.files.kind != "gguf" or not kept:
        return {}
    with GGUFFile(plan.files.weights[0]) as file:
        return {
            piece.name: tensor.type.name
            for name, tensor in file.tensors.items()
            if name not in ROPE_TENSORS and tensor.type.block > 1
            for piece in pieces(hf_name(plan.spec.architecture, name), tensor.shape)
        }


def _table(candidates: Sequence[Candidate]) -> str:
    width = max((len(row.name) for row in candidates), default=0)
    return "\n".join(
        f"  {row.name:{width}}  {row.status:10}  {'; '.join(row.reasons)}".rstrip()
        for row in candidates
    )
