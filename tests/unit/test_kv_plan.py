"""The joint KV plan: layouts and block sizes, pools within the budget, the context that fits."""

from __future__ import annotations

import pytest

from headrace.engine.config.settings import CacheSettings
from headrace.engine.kv_cache.cache import KVCache
from headrace.engine.kv_cache.plan import KVPlanError, choose_context, item_bytes, make_kv_plan
from headrace.platforms.kv_layout import CANONICAL, KVFormat, KVSpec, Layout

OTHER: Layout = ("K", "P", "S", "H", "D")
ANY = [KVFormat(CANONICAL, multiple_of=16, preferred_block_size=32)]
FULL = KVSpec(2, 64, 64, "bfloat16")
SLIDING = KVSpec(2, 64, 64, "bfloat16", window=512)
TOKEN = 2 * 128 * 2  # bytes a token of one such layer
AUTO = CacheSettings()


def plan(specs, formats=None, budget=1 << 24, settings=AUTO, length=1024, step=256):
    return make_kv_plan(specs, formats or [ANY] * len(specs), budget, settings, length, step)


def context(specs, budget, requested=0, model=4096, settings=AUTO, step=256):
    return choose_context(specs, [ANY] * len(specs), budget, settings, requested, model, step)


def test_full_attention_fills_the_budget():
    made = plan([FULL] * 4)
    (group,) = made.groups
    assert (made.layout, made.block_size, made.dtype) == (CANONICAL, 32, "bfloat16")
    assert group.layers == (0, 1, 2, 3) and group.bytes_per_block == 4 * 32 * TOKEN
    assert made.total_bytes <= 1 << 24 < made.total_bytes + group.bytes_per_block


def test_layers_are_grouped_by_window_full_attention_first():
    made = plan([SLIDING, FULL, SLIDING, FULL, SLIDING], length=8192, budget=1 << 26)
    assert [(g.window, g.layers) for g in made.groups] == [(0, (1, 3)), (512, (0, 2, 4))]
    full, sliding = made.groups
    assert sliding.num_blocks < full.num_blocks
    assert made.total_bytes <= 1 << 26
    assert made.total_bytes > 0.98 * (1 << 26), "no part of the budget lies idle"
    assert any("512" in reason for reason in made.reasons)


def test_short_contexts_need_as_much_of_a_wide_window():
    made = plan([FULL, SLIDING], length=512)
    assert made.groups[1].num_blocks == made.groups[0].num_blocks


@pytest.mark.parametrize("budget", [1 << 22, 1 << 23, 5_000_000, 1 << 25])
@pytest.mark.parametrize("windows", [(0,), (0, 512), (512,), (0, 128, 1024), (16, 33)])
def test_the_chosen_context_always_runs(budget: int, windows: tuple[int, ...]):
    """Whatever choose_context picks, make_kv_plan accepts within the budget and the cache holds one request of it."""
    specs = [KVSpec(2, 64, 64, "bfloat16", window) for window in windows]
    chosen = context(specs, budget, model=1 << 20)
    made = plan(specs, budget=budget, length=chosen.max_model_len)
    assert made.total_bytes <= budget
    assert KVCache(made).room(256) >= chosen.max_model_len
    with_more = budget + made.total_bytes
    assert context(specs, with_more, model=1 << 20).max_model_len >= chosen.max_model_len


def test_context_is_the_models_when_it_fits():
    assert context([FULL] * 2, 1 << 30).max_model_len == 4096
    assert context([FULL] * 2, 1 << 30).note == ""


def test_context_is_shortened_to_the_memory_and_said():
    chosen = context([FULL] * 2, 2 * TOKEN * 1024)
    assert chosen.max_model_len == 1024 - 32  # one block is the dummy
    assert "4096" in chosen.note and "992" in chosen.note


def test_asked_for_context_that_does_not_fit_is_an_error_with_numbers():
    with pytest.raises(KVPlanError) as caught:
        context([FULL] * 2, 2 * TOKEN * 1024, requested=2048)
    text = str(caught.value)
    assert "2048" in text and "--max-model-len to 992" in text
    assert "--kv-cache-memory-bytes" in text


def test_asked_for_context_beyond_the_model_is_an_error():
    with pytest.raises(KVPlanError, match="4096"):
        context([FULL], 1 << 30, requested=5000)


def test_unknown_model_context_must_be_given():
    with pytest.raises(KVPlanError, match="--max-model-len"):
        context([FULL], 1 << 30, model=0)
    assert context([FULL], 1 << 30, model=0, requested=100).max_model_len == 100


@pytest.mark.parametrize("budget", [0, -5, TOKEN * 16])
def test_no_memory_at_all_is_an_error(budget: int):
    with pytest.raises(KVPlanError, match="less than one block"):
        context([FULL], budget)


def test_number_of_blocks_overrides_the_memory():
    settings = CacheSettings(num_blocks=9)
    assert context([FULL], 0, settings=settings).max_model_len == 8 * 32
    assert plan([FULL], budget=0, settings=settings, length=256).groups[0].num_blocks == 9
    with pytest.raises(KVPlanError, match="9 blocks"):
        context([FULL], 0, requested=300, settings=settings)


def test_plan_refuses_a_length_that_does_not_fit():
    with pytest.raises(KVPlanError, match="1024"):
        plan([FULL], budget=TOKEN * 512)


def test_asked_for_block_size():
    assert plan([FULL], settings=CacheSettings(block_size=48)).block_size == 48
    with pytest.raises(KVPlanError, match="block size of 20"):
        plan([FULL], settings=CacheSettings(block_size=20))


def test_a_proposed_block_size_gives_way_to_what_layers_need():
    def made(proposed: int, formats=ANY, size: int = 0):
        settings = CacheSettings(block_size=size)
        return make_kv_plan(
            [FULL], [formats], 1 << 24, settings, 1024, 256, proposed_block_size=proposed
        )

    assert made(48).block_size == 48 and "the platform's default" in made(48).reasons[0]
    assert made(20).block_size == 32 and "preferred by 1 of 1 layers" in made(20).reasons[0]
    assert made(32).reasons[0].endswith("the platform's default")
    assert made(48, size=64).block_size == 64 and "as asked for" in made(48, size=64).reasons[0]
    exact = [KVFormat(CANONICAL, block_sizes=(16,), preferred_block_size=16)]
    assert made(32, exact).block_size == 16
    chosen = choose_context([FULL], [exact], 1 << 24, AUTO, 0, 1024, 256, proposed_block_size=32)
    assert chosen.max_model_len == 1024


def test_layout_must_suit_every_layer():
    first = [KVFormat(OTHER, preference=9), KVFormat(CANONICAL)]
    second = [KVFormat(CANONICAL)]
    assert plan([FULL, FULL], [first, second]).layout == CANONICAL
    assert plan([FULL, FULL], [first, first]).layout == OTHER


def test_exact_sizes_and_multiples_meet():
    exact = [KVFormat(CANONICAL, block_sizes=(16, 64, 128), preferred_block_size=16)]
    multiple = [KVFormat(CANONICAL, multiple_of=64, preferred_block_size=64)]
    assert plan([FULL, FULL], [exact, multiple]).block_size == 64


def test_common_multiple_is_found_when_no_preference_is():
    twelve = [KVFormat(CANONICAL, multiple_of=12, preferred_block_size=12)]
    sixteen = [KVFormat(CANONICAL, multiple_of=16, preferred_block_size=16)]
    assert plan([FULL, FULL], [twelve, sixteen]).block_size == 48


def test_common_multiple_alone_is_not_enough():
    exact = [KVFormat(CANONICAL, block_sizes=(16,), preferred_block_size=16)]
    multiple = [KVFormat(CANONICAL, multiple_of=64, preferred_block_size=64)]
    with pytest.raises(KVPlanError) as caught:
        plan([FULL, FULL], [exact, multiple])
    text = str(caught.value)
    assert "layers 0 accept 16" in text and "multiples of 64" in text and "force" in text


def test_unlike_dtypes_are_refused():
    with pytest.raises(KVPlanError, match="float32"):
        plan([FULL, KVSpec(2, 64, 64, "float32")])


def test_item_bytes():
    assert [item_bytes(name) for name in ("float32", "bfloat16", "int8", "fp8_e4m3")] == [
        4,
        2,
        1,
        1,
    ]
    with pytest.raises(KVPlanError, match="float3"):
        item_bytes("float3")
