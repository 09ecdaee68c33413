"""The kernels of sampling.py.

Tokens are ordered by a key, the bits of their scaled logit as an integer that grows with it. Masses are whole numbers
of 2^-42 of the largest, so that sums are exact, whatever the order they are made in and however rows are divided. A
prefix of the order is a key and how many tokens of just that key belong to it, lowest ids first; each filter, and the
draw itself, asks for the largest key whose tokens, with all above it, reach a number of tokens or a mass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.platforms.triton.launch import after_previous, let_next_start

LOWEST = tl.constexpr(-2139095041)  # the key of -inf
MANY = tl.constexpr(1 << 40)  # more tokens than there are
UNIT = tl.constexpr(2.0**42)  # the largest mass
HALF = tl.constexpr(
    2.0**21
)  # masses are added up as two numbers below this, of which float32 holds PARTS exactly
HALF_BITS = tl.constexpr(21)
PARTS = tl.constexpr(8)
EDGES = tl.constexpr(8)
ID = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-(2**63))


@triton.jit
def _key(scaled):
    """int64 that is ordered as the float32 values are; -0 must be 0."""
    bits = scaled.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    """The float32 of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scale(logits, temperature):
    """Divided by the temperature; NaN is -inf and -0 is 0."""
    known = tl.where(logits == logits, logits, float("-inf"))
    return tl.div_rn(known, tl.zeros_like(known) + temperature) + 0.0


@triton.jit
def _mass(scaled, top):
    share = tl.where(scaled == top, 1.0, tl.exp(scaled - top))
    return (share * UNIT).to(tl.int64)


@triton.jit
def _pick(numbers, index):
    """The element of a vector of EDGES at an index that is not known when the kernel is compiled; 0 before it."""
    return tl.sum(tl.where(tl.arange(0, EDGES) == index, numbers, 0), axis=0)


@triton.jit
def _best(best, request, tiles, TILES: tl.constexpr):
    """The key of the largest logit, and the lowest id that has it."""
    tile = tl.arange(0, TILES)
    packed = tl.load(best + request * tiles + tile, mask=tile < tiles, other=NOTHING)
    most = tl.max(packed, axis=0)
    return most >> 31, ((most & ID) ^ ID).to(tl.int32)


@triton.jit
def _finite(finite, request, tiles, TILES: tl.constexpr):
    """How many logits of a row are finite."""
    tile = tl.arange(0, TILES)
    return tl.sum(tl.load(finite + request * tiles + tile, mask=tile < tiles, other=0), axis=0)


@triton.jit
def peaks_kernel(
    logits, best, totals, finite, sums, stride, V, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Of each tile of a row: the largest logit and its lowest id, packed; how many are finite, and their sum.
    `sums` [R, 2 * EDGES] are set to 0 for the next kernel."""
    after_previous(PDL)
    let_next_start(PDL)
    request = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(logits + request * stride + at, mask=at < V, other=float("nan"))
    key = _key(tl.where(found == found, found, float("-inf")) + 0.0)
    packed = tl.where(at < V, (key << 31) | (at ^ ID), NOTHING)
    here = request * tiles + tl.program_id(0)
    if tl.program_id(0) == 0:
        place = tl.arange(0, 2 * EDGES)
        tl.store(sums + request * 2 * EDGES + place, tl.zeros([2 * EDGES], tl.int64))
    tl.store(best + here, tl.max(packed, axis=0))
    known = tl.abs(found) < float("inf")
    tl.store(finite + here, tl.sum(known.to(tl.int32), axis=0))
    tl.store(totals + here, tl.sum(tl.where(known, found, 0.0), axis=0))


@triton.jit
def greedy_kernel(best, finite, ids, V, tiles, TILES: tl.constexpr, PDL: tl.constexpr):
    """ids[r]: the lowest id of the largest logit, or -1 where some logit is not finite."""
    after_previous(PDL)
    let_next_start(PDL)
    request = tl.program_id(0).to(tl.int64)
    _, chosen = _best(best, request, tiles, TILES)
    fails = _finite(finite, request, tiles, TILES) < V
    tl.store(ids + request, tl.where(fails, -1, chosen))


@triton.jit
def _above_edges(row, start, V, temperature, top, edges, PART: tl.constexpr):
    """Of PARTS pieces of PART tokens: how many, and what mass, are at or above each of EDGES values, lane by lane.

    int32 and int64 [EDGES, PART]. Added up in float32, without a rounding: the units that multiply are twice as many
    as those that add whole numbers, and take what a comparison says as a factor.
    """
    number = tl.zeros([EDGES, PART], tl.float32)
    upper = tl.zeros([EDGES, PART], tl.float32)
    lower = tl.zeros([EDGES, PART], tl.float32)
    for part in tl.static_range(PARTS):
        at = start + part * PART + tl.arange(0, PART)
        scaled = _scale(tl.load(row + at, mask=at < V, other=float("-inf")), temperature)
        share = tl.where(scaled == top, 1.0, tl.exp(scaled - top)) * HALF
        whole = tl.floor(share)
        rest = tl.floor((share - whole) * HALF)
        scaled = tl.where(at < V, scaled, float("nan"))  # above nothing
        above = tl.where(scaled[None, :] >= edges[:, None], 1.0, 0.0)
        number += above
        upper += above * whole[None, :]
        lower += above * rest[None, :]
    return number.to(tl.int32), (upper.to(tl.int64) << HALF_BITS) + lower.to(tl.int64)


@triton.jit
def masses_kernel(
    logits, temperatures, best, totals, finite, sums, edges, counts, stride, V, tiles,
    TILES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """How many tokens of a row lie at or above each of EDGES values, and their mass: added to `sums`; the number in
    each tile: counts [R, EDGES, tiles].

    The edges divide what lies between the largest and the mean logit, and a sixth more below; the last is -inf.
    """
    after_previous(PDL)
    let_next_start(PDL)
    request = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + request)
    if temperature > 0:
        key, _ = _best(best, request, tiles, TILES)
        top = tl.sum(_scale(tl.zeros([1], tl.float32) + _value(key), temperature), axis=0)
        tile = tl.arange(0, TILES)
        total = tl.load(totals + request * tiles + tile, mask=tile < tiles, other=0.0)
        number = _finite(finite, request, tiles, TILES)
        mean = tl.sum(total, axis=0) / tl.maximum(number, 1)
        depth = top - mean / temperature
        depth = tl.where((depth > 0) & (depth < 1e30), depth, 1.0)
        index = tl.arange(0, EDGES)
        edge = tl.where(index == EDGES - 1, float("-inf"), top - depth * (index + 1) / 6) + 0.0
        if tl.program_id(0) == 0:
            tl.store(edges + request * EDGES + index, edge)
        row = logits + request * stride
        start = tl.program_id(0) * BLOCK
        few, weight = _above_edges(row, start, V, temperature, top, edge, BLOCK // PARTS)
        count, mass = tl.sum(few, axis=1), tl.sum(weight, axis=1)
        tl.store(counts + (request * EDGES + index) * tiles + tl.program_id(0), count)
        place = sums + request * 2 * EDGES + index
        tl.atomic_add(place, count.to(tl.int64), sem="relaxed")
        tl.atomic_add(place + EDGES, mass, sem="relaxed")


@triton.jit
def _read(row, values, listed, at, n, temperature):
    """Scaled logits of a piece of the candidates, or of the whole row where no list holds them."""
    whole = tl.load(row + at, mask=(at < n) & (listed == 0), other=float("-inf"))
    few = tl.load(values + at, mask=(at < n) & (listed != 0), other=float("-inf"))
    return tl.where(listed != 0, few, _scale(whole, temperature))


@triton.jit
def _from(row, values, listed, n, temperature, top, key, by_count, CHUNK: tl.constexpr):
    """What the tokens from a key on weigh: their number or their mass."""
    weight = tl.zeros([CHUNK], tl.int64)
    for start in range(0, n, CHUNK):
        at = start + tl.arange(0, CHUNK)
        scaled = _read(row, values, listed, at, n, temperature)
        one = tl.where(by_count, 1, _mass(scaled, top))
        weight += tl.where((_key(scaled) >= key) & (at < n), one, 0)
    return tl.sum(weight, axis=0)


@triton.jit
def _around(row, values, listed, n, temperature, top, key, CHUNK: tl.constexpr):
    """Tokens above a key, their mass, and how many have just that key."""
    above = tl.zeros([CHUNK], tl.int32)
    mass = tl.zeros([CHUNK], tl.int64)
    equal = tl.zeros([CHUNK], tl.int32)
    for start in range(0, n, CHUNK):
        at = start + tl.arange(0, CHUNK)
        scaled = _read(row, values, listed, at, n, temperature)
        own = tl.where(at < n, _key(scaled), NOTHING)
        above += (own > key).to(tl.int32)
        mass += tl.where(own > key, _mass(scaled, top), 0)
        equal += (own == key).to(tl.int32)
    number, ties = tl.sum(above, axis=0), tl.sum(equal, axis=0)
    return number.to(tl.int64), tl.sum(mass, axis=0), ties.to(tl.int64)


@triton.jit
def _nth(row, values, listed, n, temperature, key, rank, otherwise, CHUNK: tl.constexpr):
    """Where the rank-th token, from 1, among those with a key stands."""
    seen = tl.zeros([], tl.int32)
    chosen = otherwise
    for start in range(0, n, CHUNK):
        at = start + tl.arange(0, CHUNK)
        own = _key(_read(row, values, listed, at, n, temperature))
        here = ((own == key) & (at < n)).to(tl.int32)
        count = tl.sum(here, axis=0)
        if (seen < rank) & (seen + count >= rank):
            order = tl.cumsum(here, axis=0) + seen
            chosen = tl.min(tl.where((here > 0) & (order == rank), at, n - 1), axis=0)
        seen += count
    return chosen


@triton.jit
def _list(row, V, temperature, low, high, values, tokens, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Write the tokens with keys in [low, high], by rising id, and their scaled logits."""
    filled = tl.zeros([], tl.int32)
    for start in range(0, V, CHUNK):
        at = start + tl.arange(0, CHUNK)
        scaled = _scale(tl.load(row + at, mask=at < V, other=float("-inf")), temperature)
        key = _key(scaled)
        inside = (key >= low) & (key <= high) & (at < V)
        count = tl.sum(inside.to(tl.int32), axis=0)
        if count > 0:
            place = filled + tl.cumsum(inside.to(tl.int32), axis=0) - 1
            fits = inside & (place < SIZE)
            tl.store(values + place, scaled, mask=fits)
            tl.store(tokens + place, at, mask=fits)
        filled += count
    tl.debug_barrier()  # what other threads wrote is read next


@triton.jit
def _likely(key, top, min_p):
    """The lowest key whose mass is at least `min_p` of the largest's, which is that of `key`."""
    low = tl.full([], LOWEST, tl.int64)
    high = key
    while low < high:
        middle = low + (high - low) // 2
        if tl.exp(_value(middle) - top) >= min_p:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def _first_place(count, mass, keys, least, k, top_p, uniform, V):
    """At which edge the first filter that is on ends, or else the draw."""
    total = _pick(mass, EDGES - 1)
    by_count = (k > 0) & (k < V)
    by_mass = top_p < 1
    given = (least > LOWEST) & (by_count == 0) & (by_mass == 0)
    share = tl.where(by_mass, top_p, uniform).to(tl.float64) * total.to(tl.float64)
    goal = tl.where(by_mass, tl.ceil(share), tl.floor(share) + 1).to(tl.int64)
    goal = tl.where(by_count, k, tl.minimum(tl.maximum(goal, 1), total))
    reached = tl.where(by_count, count, mass)
    behind = tl.where(given, keys > least, reached < goal)
    return tl.minimum(tl.sum(behind.to(tl.int32), axis=0), EDGES - 1)


@triton.jit
def list_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, best, sums, edges, counts, values,
    tokens, stride, V, tiles, TILES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each tile's part of the list for the first stage, if there are no more than SIZE such tokens in the row."""
    after_previous(PDL)
    let_next_start(PDL)
    request = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + request)
    if temperature > 0:
        topmost, _ = _best(best, request, tiles, TILES)
        top = tl.sum(_scale(tl.zeros([1], tl.float32) + _value(topmost), temperature), axis=0)
        min_p = tl.load(min_ps + request)
        least = tl.full([], LOWEST, tl.int64)
        if min_p > 0:
            least = _likely(_key(top), top, min_p)
        index = tl.arange(0, EDGES)
        count = tl.load(sums + request * 2 * EDGES + index)
        mass = tl.load(sums + request * 2 * EDGES + EDGES + index)
        edge = tl.load(edges + request * EDGES + index)
        k, top_p = tl.load(top_ks + request).to(tl.int64), tl.load(top_ps + request)
        uniform = tl.load(uniforms + request)
        place = _first_place(count, mass, _key(edge), least, k, top_p, uniform, V)
        whole = (place == 0) | (_pick(count, place) <= SIZE)
        inside = _pick(count, place) - tl.where(whole, 0, _pick(count, place - 1))
        tile = tl.arange(0, TILES)
        here = counts + (request * EDGES + place) * tiles + tile
        number = tl.load(here, mask=tile < tiles, other=0)
        number -= tl.load(here - tiles, mask=(tile < tiles) & (whole == 0), other=0)
        own = tl.sum(tl.where(tile == tl.program_id(0), number, 0), axis=0)
        if (inside <= SIZE) & (own > 0):
            filled = tl.sum(tl.where(tile < tl.program_id(0), number, 0), axis=0)
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            logit = tl.load(logits + request * stride + at, mask=at < V, other=float("-inf"))
            scaled = _scale(logit, temperature)
            low = tl.sum(tl.where(index == place, edge, 0.0), axis=0)
            above = tl.sum(tl.where(index == place - 1, edge, 0.0), axis=0)
            within = (scaled >= low) & (whole | (scaled < above)) & (at < V)
            order = request * SIZE + filled + tl.cumsum(within.to(tl.int32), axis=0) - 1
            tl.store(values + order, scaled, mask=within)
            tl.store(tokens + order, at, mask=within)


@triton.jit
def draw_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, best, finite, sums, edges, values,
    tokens, ids, stride, V, tiles, TILES: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
    CHUNK: tl.constexpr, GUARD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ids[r] for row r, one program a row. Stages: top-k, top-p, min-p, the draw.

    Between which edges a stage's key lies is known from the sums. The tokens there (those above as well, if so few
    fit) are on a list of SIZE that the key is searched in; where it lies elsewhere the list is made anew. Where more
    lie between two edges, new edges divide what is between them, by a pass over the row, until they fit or are equal.
    """
    after_previous(PDL)
    let_next_start(PDL)
    request = tl.program_id(0).to(tl.int64)
    topmost, chosen = _best(best, request, tiles, TILES)
    temperature = tl.load(temperatures + request)
    fails = False
    if GUARD:
        fails = _finite(finite, request, tiles, TILES) < V
    if (temperature > 0) & (not fails):
        row = logits + request * stride
        values += request * SIZE
        tokens += request * SIZE
        top = tl.sum(_scale(tl.zeros([1], tl.float32) + _value(topmost), temperature), axis=0)
        topmost = _key(top)
        index = tl.arange(0, EDGES)
        count = tl.load(sums + request * 2 * EDGES + index)
        mass = tl.load(sums + request * 2 * EDGES + EDGES + index)
        keys = _key(tl.load(edges + request * EDGES + index))
        k = tl.load(top_ks + request).to(tl.int64)
        top_p = tl.load(top_ps + request)
        min_p = tl.load(min_ps + request)
        # the kept prefix: keys above `last`, so many with it, and their mass
        last = tl.full([], LOWEST, tl.int64)
        ties = tl.full([], MANY, tl.int64)
        kept = _pick(mass, EDGES - 1)
        least = tl.full([], LOWEST, tl.int64)
        if min_p > 0:
            least = _likely(topmost, top, min_p)
        # the list that was made: keys in [list_low, list_high], and what is above them
        place = _first_place(count, mass, keys, least, k, top_p, tl.load(uniforms + request), V)
        whole = (place == 0) | (_pick(count, place) <= SIZE)
        base_count = tl.where(whole, 0, _pick(count, place - 1))
        base_mass = tl.where(whole, 0, _pick(mass, place - 1))
        list_low = _pick(keys, place)
        list_high = tl.where(whole, topmost, _pick(keys, place - 1) - 1)
        n = (_pick(count, place) - base_count).to(tl.int32)
        listed = (n <= SIZE).to(tl.int32)
        for stage in range(4):
            active = (
                ((stage == 0) & (k > 0) & (k < V)) | ((stage == 1) & (top_p < 1)) | (stage == 3)
            )
            given = (stage == 2) & (least > last)
            if active | given:
                by_count = stage == 0
                share = tl.where(stage == 3, tl.load(uniforms + request), top_p).to(tl.float64)
                share *= kept.to(tl.float64)
                goal = tl.where(stage == 3, tl.floor(share) + 1, tl.ceil(share)).to(tl.int64)
                goal = tl.where(by_count, k, tl.minimum(tl.maximum(goal, 1), kept))
                reached = tl.where(by_count, count, mass)
                place = tl.sum((tl.where(given, keys > least, reached < goal)).to(tl.int32), axis=0)
                place = tl.minimum(place, EDGES - 1)
                low = _pick(keys, place)
                high = tl.where(place > 0, _pick(keys, place - 1) - 1, topmost)
                if (listed == 0) | (low < list_low) | (high > list_high):
                    base_count = _pick(count, place - 1)
                    base_mass = _pick(mass, place - 1)
                    inside = _pick(count, place)
                    if inside <= SIZE:
                        high = topmost
                        base_count = tl.zeros([], tl.int64)
                        base_mass = tl.zeros([], tl.int64)
                    else:
                        inside -= base_count
                    while (inside > SIZE) & (low < high):
                        width = (high - low) // EDGES + 1
                        between = tl.maximum(high + 1 - width * (index + 1), low)
                        few = tl.zeros([EDGES, PART], tl.int32)
                        weights = tl.zeros([EDGES, PART], tl.int64)
                        for start in range(0, V, PARTS * PART):
                            some, heavy = _above_edges(
                                row, start, V, temperature, top, _value(between), PART
                            )
                            few += some
                            weights += heavy
                        number = tl.sum(few, axis=1).to(tl.int64)
                        weight = tl.sum(weights, axis=1)
                        reached = tl.where(by_count, number, weight)
                        behind = tl.where(given, between > least, reached < goal)
                        place = tl.minimum(tl.sum(behind.to(tl.int32), axis=0), EDGES - 1)
                        low = _pick(between, place)
                        if place > 0:
                            high = _pick(between, place - 1) - 1
                            base_count = _pick(number, place - 1)
                            base_mass = _pick(weight, place - 1)
                        inside = _pick(number, place) - base_count
                    listed = (inside <= SIZE).to(tl.int32)
                    if listed != 0:
                        n = inside.to(tl.int32)
                        list_low = low
                        list_high = high
                        _list(row, V, temperature, low, high, values, tokens, SIZE, 2 * CHUNK)
                    else:  # all between are equal: the whole row is looked at
                        n = V + tl.zeros([], tl.int32)
                        base_count = tl.zeros([], tl.int64)
                        base_mass = tl.zeros([], tl.int64)
                if given:
                    low = least
                    high = least
                base = tl.where(by_count, base_count, base_mass)
                while low < high:
                    middle = low + (high - low + 1) // 2
                    weight = base + _from(
                        row, values, listed, n, temperature, top, middle, by_count, CHUNK
                    )
                    if weight >= goal:
                        low = middle
                    else:
                        high = middle - 1
                number, weight, equal = _around(
                    row, values, listed, n, temperature, top, low, CHUNK
                )
                number += base_count
                weight += base_mass
                one = tl.sum(_mass(tl.zeros([1], tl.float32) + _value(low), top), axis=0)
                missing = goal - tl.where(by_count, number, weight)
                each = tl.where(by_count, 1, tl.maximum(one, 1))
                needed = tl.minimum(tl.maximum((missing + each - 1) // each, 1), equal)
                needed = tl.where(given, equal, needed)
                needed = tl.where(low == last, tl.minimum(needed, ties), needed)
                last = low
                ties = needed
                kept = weight + ties * one
        rank = ties.to(tl.int32)
        place = _nth(row, values, listed, n, temperature, last, rank, chosen, CHUNK)
        if listed != 0:
            chosen = tl.load(tokens + place)
        else:
            chosen = place
    if GUARD:
        chosen = tl.where(fails, -1, chosen)
    tl.store(ids + request, chosen)
